// The index of the lookup drafter: a text that grows, and the places of every three tokens in it.
// `TextIndex` of engine/drafting/lookup.py is the specification.
#pragma once
#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace motley {

class TextIndex {
public:
    static constexpr int64_t kKey = 3;  // tokens
    static constexpr int kMaxPlaces = 8;
    static constexpr int64_t kMaxMatch = 32;     // tokens: a longer match is not better
    static constexpr int64_t kPortion = 1 << 16;  // tokens that are indexed in one step, about a millisecond

    struct Continuation {
        std::vector<int32_t> tokens;
        int64_t n_match = 0;
    };

    explicit TextIndex(std::vector<int32_t> prompt) : text_(std::move(prompt)), n_prompt_(size()), before_(kKey, -1) {}

    int64_t n_generated() const { return size() - n_prompt_; }
    void append(int32_t token) { text_.push_back(token); }

    // Indexes a portion of what is not indexed yet.
    void index() {
        const int64_t first = static_cast<int64_t>(before_.size()), stop = std::min(size(), first + kPortion);
        for (int64_t place = first; place < stop; place++) {
            if (2 * (n_keys_ + 1) > static_cast<int64_t>(latest_.size())) grow();
            int32_t& latest = find(text_.data() + place);
            before_.push_back(latest);
            if (latest < 0) n_keys_++;
            latest = static_cast<int32_t>(place);
        }
    }

    // Up to `n_max` tokens that may follow the text, and the length of the match that they come from; none: no match.
    Continuation continuation(int64_t n_max) const {
        int32_t place = size() < kKey || latest_.empty() ? -1 : find(text_.data() + size());
        if (place < 0) return {};
        int32_t places[kMaxPlaces];
        int n_places = 0;
        int64_t n_best = kKey;
        for (int i = 0; i < kMaxPlaces && place >= 0; i++, place = before_[place]) {
            const int64_t n = n_match(place);
            if (n > n_best) n_places = 0, n_best = n;
            if (n == n_best) places[n_places++] = place;
            if (n_best == kMaxMatch) break;
        }
        return {copied(start_of(places, n_places), n_max), n_best};
    }

private:
    int64_t size() const { return static_cast<int64_t>(text_.size()); }

    // The place of the most frequent next token; of equally frequent ones, that of the first.
    int64_t start_of(const int32_t* places, int n_places) const {
        int n_most = 0, best = 0;
        for (int i = 0; n_places > 2 && i < n_places; i++) {
            int n = 0;
            for (int j = 0; j < n_places; j++) n += text_[places[j]] == text_[places[i]];
            if (n > n_most) n_most = n, best = i;
        }
        return places[best];
    }

    // A text that repeats itself continues with what was copied.
    std::vector<int32_t> copied(int64_t start, int64_t n_max) const {
        std::vector<int32_t> tokens;
        const int64_t period = size() - start;
        for (int64_t i = 0; i < n_max; i++) tokens.push_back(i < period ? text_[start + i] : tokens[i - period]);
        return tokens;
    }

    // How many tokens before `place` are the last ones of the text.
    int64_t n_match(int64_t place) const {
        int64_t n = kKey;
        while (n < kMaxMatch && n < place && text_[place - 1 - n] == text_[size() - 1 - n]) n++;
        return n;
    }

    // The entry of the three tokens before `end`: the place after their latest occurrence, or -1. At least half of the
    // entries are free.
    const int32_t& find(const int32_t* end) const {
        uint64_t hash = 0;
        for (int64_t i = 1; i <= kKey; i++) hash = (hash ^ static_cast<uint32_t>(end[-i])) * 0x9E3779B97F4A7C15u;
        const size_t mask = latest_.size() - 1;
        size_t at = (hash >> 32) & mask;
        while (latest_[at] >= 0 && !std::equal(end - kKey, end, text_.data() + latest_[at] - kKey)) at = (at + 1) & mask;
        return latest_[at];
    }
    int32_t& find(const int32_t* end) { return const_cast<int32_t&>(std::as_const(*this).find(end)); }

    void grow() {
        std::vector<int32_t> old(std::max<size_t>(64, 2 * latest_.size()), -1);
        old.swap(latest_);
        for (const int32_t place : old)
            if (place >= 0) find(text_.data() + place) = place;
    }

    std::vector<int32_t> text_;
    const int64_t n_prompt_;
    std::vector<int32_t> latest_;  // a hash table, by three tokens
    int64_t n_keys_ = 0;
    std::vector<int32_t> before_;  // place → the place before it with the same three tokens; -1: none
};

}  // namespace motley
