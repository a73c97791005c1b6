// A stretch of the keys or values of one head in the paged cache: where its tiles are, or a copy of them.
#pragma once
#include "attention_tasks.hpp"
#include "cache_types.hpp"

namespace motley::MOTLEY_ISA {

// A stretch of a head's keys in a store: kStretch positions from `first` on, a multiple of kStretch. Its division is done once
// for all tiles.
class Stretch {
public:
    Stretch() = default;
    Stretch(const CacheStoreView& store, const CacheShape& shape, const SequenceView& sequence, int64_t head, int64_t first, int64_t n_keys,
            const Path* path = nullptr)
        : store_(&store), shape_(&shape), sequence_(&sequence), path_(path), head_(head), first_(first), n_keys_(n_keys) {
        const bool is_whole = shape.block_size % kStretch == 0 && sequence_->first % kStretch == 0 && first >= sequence_->first &&
                              first < n_keys && !(path && first + kStretch > path->base);
        if (is_whole) whole_ = cell(first);
    }

    // Whether the stretch is in one block, its keys next to each other.
    bool is_whole() const { return whole_ >= 0; }

    // Addresses in a tile. If the stretch is not whole, its cells are copied to `staged`.
    [[gnu::always_inline]] TileCells cells(int64_t tile, uint8_t* staged) const {
        if (!is_whole()) return copy(tile, staged);
        const int64_t i = whole_ + tile * shape_->block_size;
        return {store_->codes + i * shape_of(store_->kind).code_bytes, store_->high_bits ? store_->high_bits + 4 * i : nullptr,
                store_->scale ? store_->scale + i : nullptr, store_->minimum ? store_->minimum + i : nullptr};
    }

    // Prefetches a whole one: a head's part of a block is too short for the hardware prefetcher.
    [[gnu::always_inline]] void fetch_all() const {
        if (!is_whole()) return;
        const int64_t n_bytes = kStretch * shape_of(store_->kind).code_bytes;
        for (int64_t tile = 0; tile < shape_->n_tiles; tile++) {
            const TileCells found = cells(tile, nullptr);
            fetch(found.codes, n_bytes);
            if (found.scale) fetch(found.scale, 1);  // a prefetch of a null address takes as long as a miss of the TLB
            if (found.minimum) fetch(found.minimum, 1);
            if (found.high_bits) fetch(found.high_bits, 1);
        }
    }

private:
    // The number of a key's cell in the first tile.
    int64_t cell(int64_t key) const {
        key = (path_ ? path_->place(key) : key) - sequence_->first;
        const int64_t row = sequence_->blocks[key / shape_->block_size] * store_->n_rows + store_->first_row + head_;
        return row * shape_->n_tiles * shape_->block_size + key % shape_->block_size;
    }

    [[gnu::noinline]] TileCells copy(int64_t tile, uint8_t* staged) const {
        const KindShape kind = shape_of(store_->kind);
        uint8_t* high_bits = staged + kStretch * 128;
        auto* scale = reinterpret_cast<uint16_t*>(high_bits + 4 * kStretch);
        uint16_t* minimum = scale + kStretch;
        std::memset(staged, 0, kStretch * (128 + 8));
        for (int64_t t = first_ < sequence_->first ? sequence_->first - first_ : 0; t < kStretch && first_ + t < n_keys_; t++) {
            const int64_t i = cell(first_ + t) + tile * shape_->block_size;
            std::memcpy(staged + t * kind.code_bytes, store_->codes + i * kind.code_bytes, kind.code_bytes);
            if (kind.has_high_bits) std::memcpy(high_bits + 4 * t, store_->high_bits + 4 * i, 4);
            if (kind.has_scale) scale[t] = store_->scale[i];
            if (kind.has_minimum) minimum[t] = store_->minimum[i];
        }
        return {staged, high_bits, scale, minimum};
    }

    const CacheStoreView* store_;
    const CacheShape* shape_;
    const SequenceView* sequence_;
    const Path* path_;
    int64_t head_, first_, n_keys_, whole_ = -1;  // `whole_`: the first key's cell; -1: not whole
};

}  // namespace motley::MOTLEY_ISA
