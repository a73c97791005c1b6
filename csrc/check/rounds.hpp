// Several rounds of one call: each round's tokens are the next one's inputs, at the next positions and slots. And steps in
// which sequences have several tokens.
#pragma once
#include "../drafting.hpp"
#include "../steady.hpp"
#include "check.hpp"

namespace motley {
namespace rounds {

constexpr int32_t kVocab = 23;
constexpr int64_t kBlock = 2;
constexpr size_t kRows = 2;
inline const std::vector<std::vector<int32_t>> kBlocks{{5, 0, 7}, {3, 1, 2}};
using Rounds = std::vector<std::vector<int32_t>>;

// The logits after a token at a position: one token is the likeliest.
inline void put_logits(int32_t token, int32_t position, float* logits) {
    std::fill(logits, logits + kVocab, 0.0f);
    logits[(5 * token + 3 * position + 1) % kVocab] = 1;
}

// A model of one step, which notes its slots. Its logits depend on tokens and positions only; `none_after`: the token after
// which no token can be chosen.
struct TinyModel {
    std::vector<int32_t> tokens, positions, output_rows, others;
    std::vector<float> logits;
    std::vector<int64_t> slots;
    int32_t none_after = -1;
    Batch batch;
    Program program{std::make_shared<Pool>(2, "", std::vector<int>{})};

    explicit TinyModel(size_t max_rows = kRows)
        : tokens(max_rows), positions(max_rows), output_rows(max_rows), others(max_rows), logits(max_rows * kVocab) {
        program.add([this](const Worker&) {
            const SequenceView& last = batch.view.sequences[batch.view.n_sequences - 1];
            for (int64_t row = 0; row < last.first_token + last.n_tokens; row++) {
                slots.push_back(batch.view.slots[row]);
                float* const own = logits.data() + row * kVocab;
                put_logits(tokens[row], positions[row], own);
                if (tokens[row] == none_after) std::fill(own, own + kVocab, -INFINITY);
            }
        }, 0);
    }
};

inline SteadyPrograms programs_of(TinyModel& model, int64_t max_rows) {
    return {max_rows,
            {{&model.program, model.tokens.data(), model.positions.data(), model.output_rows.data(), {{model.others.data(), {6, 7}}}, {{0, &model.batch}}}},
            model.logits.data()};
}

inline void place(Batch& batch, const std::vector<int32_t>& positions) {
    batch.clear(kBlock);
    for (size_t row = 0; row < kRows; row++) {
        batch.blocks().insert(batch.blocks().end(), kBlocks[row].begin(), kBlocks[row].end());
        batch.add(static_cast<int64_t>(row), 1, positions[row], 0);
    }
    batch.finish();
}

inline Rounds expected_rounds(std::vector<int32_t> tokens, const std::vector<int32_t>& positions, const std::vector<int64_t>& indexes,
                              const std::vector<const RowSampler*>& samplers, size_t n_rounds) {
    Rounds rounds;
    for (int32_t round = 0; rounds.size() < n_rounds; round++) {
        for (size_t row = 0; row < kRows; row++) {
            float logits[kVocab];
            put_logits(tokens[row], positions[row] + round, logits);
            const int64_t index = indexes[row] + round;
            choose_tokens(logits, 1, kVocab, &samplers[row], &index, &tokens[row]);
        }
        rounds.push_back(tokens);
    }
    return rounds;
}

inline std::vector<int64_t> expected_slots(const std::vector<int32_t>& positions, size_t n_rounds) {
    std::vector<int64_t> slots;
    for (size_t round = 0; round < n_rounds; round++)
        for (size_t row = 0; row < kRows; row++) {
            const int64_t position = positions[row] + static_cast<int64_t>(round);
            slots.push_back(kBlocks[row][position / kBlock] * kBlock + position % kBlock);
        }
    return slots;
}

template <class Work>
bool is_refused(Work work) {
    try {
        work();
    } catch (const std::invalid_argument&) {
        return true;
    }
    return false;
}

}  // namespace rounds

inline void check_rounds() {
    using namespace rounds;
    const RowSampler greedy{0, 40, 0.95, 0.05, 1}, drawing{1.0, 40, 1.0, 0.0, 7};
    const std::vector<const RowSampler*> samplers{&greedy, &drawing};
    const std::vector<int32_t> tokens{4, 9}, positions{1, 3};
    const std::vector<int64_t> indexes{0, 6};
    const Rounds expected = expected_rounds(tokens, positions, indexes, samplers, 3);
    const std::string where = "rounds";
    Team team(1);

    TinyModel model;
    SteadyBatch steady(kRows, 1, kVocab, samplers);
    steady.add(programs_of(model, kRows));
    place(steady.tables(0), {0, 0});
    const auto run = [&](int n_rounds, const std::vector<int32_t>& stops) {
        model.slots.clear();
        return steady.run(team, tokens, positions, indexes, n_rounds, stops);
    };
    for (const int n_rounds : {1, 3, 2}) {
        const auto n = static_cast<size_t>(n_rounds);
        require(run(n_rounds, {}) == Rounds(expected.begin(), expected.begin() + n_rounds), "wrong tokens", where);
        require(model.slots == expected_slots(positions, n), "wrong slots", where);
    }
    require(run(3, {kVocab, expected[1][1]}) == Rounds(expected.begin(), expected.begin() + 2), "no end after a stop token", where);
    model.none_after = expected[0][0];
    const Rounds cut = run(3, {});
    require(cut.size() == 2 && cut[1][0] == kNoneLeft && cut[1][1] == expected[1][1], "no end after a row without a token", where);
    model.none_after = -1;
    require(is_refused([&] { run(4, {}); }), "a round beyond the blocks", where);
    require(run(3, {}) == expected, "a refused run leaves something behind", where);
    require(is_refused([&] { steady.run(team, {4}, positions, indexes, 1, {}); }), "a token for one of two rows", where);
    require(is_refused([&] { steady.run(team, tokens, {1}, indexes, 1, {}); }), "a position for one of two rows", where);
    require(is_refused([&] { steady.run(team, tokens, positions, {}, 1, {}); }), "rows without an index", where);
    require(is_refused([&] { steady.tables(1); }), "an unknown group", where);
    require(is_refused([&] { steady.add({kRows, {}, model.logits.data()}); }), "no device", where);
    require(is_refused([&] { SteadyBatch(kRows, 0, kVocab, samplers).add(programs_of(model, kRows)); }), "a slot of no group", where);
    require(is_refused([&] { SteadyBatch(1, 1, kVocab, samplers); }), "too many samplers", where);

    // Several tokens of each sequence, with the programs for so many rows.
    TinyModel wide(5);
    const std::vector<int32_t> rows{4, expected[0][0], 8, 9}, counts{3, 1};
    const auto run_rows = [&](const std::vector<int32_t>& numbers) {
        wide.slots.clear();
        return steady.run_rows(team, rows, numbers, positions, indexes);
    };
    require(is_refused([&] { run_rows(counts); }), "more rows than programs have room for", where);
    steady.add(programs_of(wide, 5));
    const std::vector<int32_t> chosen = run_rows(counts);
    require(chosen[0] == expected[0][0] && chosen[1] == expected[1][0] && chosen[3] == expected[0][1], "wrong tokens of rows", where);
    require(wide.slots == std::vector<int64_t>{11, 0, 1, 3}, "wrong slots of rows", where);
    const auto begins_with = [](const std::vector<int32_t>& all, const std::vector<int32_t>& first) { return std::equal(first.begin(), first.end(), all.begin()); };
    require(begins_with(wide.positions, {1, 2, 3, 3}) && begins_with(wide.output_rows, {0, 1, 2, 3}), "wrong places of rows", where);
    require(begins_with(wide.others, {6, 6, 6, 7}), "a number of another sequence", where);
    require(is_refused([&] { run_rows({4, 0}); }) && is_refused([&] { run_rows({3, 2}); }), "tokens of no sequence", where);
    require(run(3, {}) == expected && model.slots == expected_slots(positions, 3), "steps of one token have other programs", where);

    // The same as drafts of a draft model, whose first inputs are set by the caller.
    const auto draft = [&](int n_rounds) {
        model.tokens = tokens;
        model.positions = positions;
        place(model.batch, positions);
        model.slots.clear();
        return draft_tokens(team, {{&model.program, model.tokens.data(), model.positions.data(), {&model.batch}}}, model.logits.data(),
                            kVocab, samplers, indexes, n_rounds);
    };
    require(draft(3) == expected && model.slots == expected_slots(positions, 3), "wrong drafts", where);
    model.none_after = expected[0][0];
    require(draft(3).size() == 2, "a draft continues after a row without a token", where);
    model.none_after = -1;
    require(is_refused([&] { draft(4); }), "a draft beyond the blocks", where);
}

}  // namespace motley
