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
    static constexpr int64_t kPortion = 512;     // tokens that are indexed in one step: some 30 µs

    static constexpr int64_t kAhead = 16;        // tokens whose entries are fetched while others are indexed

    struct Continuation {
        std::vector<int32_t> tokens;
        int64_t n_match = 0;
    };

    // Has room for the prompt; its tokens are indexed later.
    explicit TextIndex(std::vector<int32_t> prompt) : text_(std::move(prompt)), n_prompt_(size()), before_(kKey, -1) {
        size_t n_entries = 64;
        while (static_cast<int64_t>(n_entries) < 2 * (size() + 1)) n_entries *= 2;
        latest_.assign(n_entries, -1);
        before_.reserve(size() + kPortion);
        text_.reserve(size() + kPortion);
    }

    int64_t n_generated() const { return size() - n_prompt_; }
    void append(int32_t token) { text_.push_back(token); }

    // Tokens that are not indexed yet.
    int64_t n_left() const { return std::max<int64_t>(0, size() - static_cast<int64_t>(before_.size())); }

    // Indexes up to `n_max` of the tokens that are not indexed yet.
    void index(int64_t n_max = kPortion) {
        const int64_t first = static_cast<int64_t>(before_.size()), stop = first + std::min(n_left(), n_max);
        for (int64_t place = first; place < stop; place++) {
            if (2 * (n_keys_ + 1) > static_cast<int64_t>(latest_.size())) grow();
            if (!old_.empty()) move_some();
            const int32_t* end = text_.data() + place;
            if (place + kAhead < size()) __builtin_prefetch(&latest_[slot(latest_, end + kAhead)], 1);
            int32_t& latest = entry(latest_, end);
            const int32_t before = latest < 0 && !old_.empty() ? entry(old_, end) : latest;
            before_.push_back(before);
            if (before < 0) n_keys_++;
            latest = static_cast<int32_t>(place);
        }
    }

    // Up to `n_max` tokens that may follow the text, and the length of the match that they come from; none: no match.
    Continuation continuation(int64_t n_max) const {
        int32_t place = size() < kKey ? -1 : latest(text_.data() + size());
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

    // The place after the latest occurrence of the three tokens before `end`, or -1.
    int32_t latest(const int32_t* end) const {
        const int32_t place = entry(latest_, end);
        return place < 0 && !old_.empty() ? entry(old_, end) : place;
    }

    // Where the search for the three tokens before `end` begins in a table.
    static size_t slot(const std::vector<int32_t>& table, const int32_t* end) {
        uint64_t hash = 0;
        for (int64_t i = 1; i <= kKey; i++) hash = (hash ^ static_cast<uint32_t>(end[-i])) * 0x9E3779B97F4A7C15u;
        return (hash >> 32) & (table.size() - 1);
    }

    // The entry of the three tokens before `end`: the place after their latest occurrence, or -1. At least half of the
    // entries are free.
    const int32_t& entry(const std::vector<int32_t>& table, const int32_t* end) const {
        const size_t mask = table.size() - 1;
        size_t at = slot(table, end);
        while (table[at] >= 0 && !std::equal(end - kKey, end, text_.data() + table[at] - kKey)) at = (at + 1) & mask;
        return table[at];
    }
    int32_t& entry(std::vector<int32_t>& table, const int32_t* end) {
        return const_cast<int32_t&>(std::as_const(*this).entry(table, end));
    }

    // Begins a table of twice the size. The entries of the old one are moved little by little: all at once would take
    // as long as a step of a small model.
    void grow() {
        old_ = std::exchange(latest_, std::vector<int32_t>(2 * latest_.size(), -1));
        n_moved_ = 0;
    }

    // Moves more entries for each new token than it takes to be ready when the new table has to grow: two.
    void move_some() {
        const size_t stop = std::min(old_.size(), n_moved_ + 8);
        for (; n_moved_ < stop; n_moved_++) {
            const int32_t place = old_[n_moved_];
            if (place < 0) continue;
            int32_t& latest = entry(latest_, text_.data() + place);
            if (latest < 0) latest = place;
        }
        if (n_moved_ == old_.size()) old_ = {};
    }

    std::vector<int32_t> text_;
    const int64_t n_prompt_;
    std::vector<int32_t> latest_;  // a hash table, by three tokens
    std::vector<int32_t> old_;     // the table before the latest one, until its entries are moved; no entry of it changes
    size_t n_moved_ = 0;           // entries of `old_`
    int64_t n_keys_ = 0;
    std::vector<int32_t> before_;  // place → the place before it with the same three tokens; -1: none
};

}  // namespace motley
