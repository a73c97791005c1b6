// GGUF rows ⇄ groups of kLanes rows with their 4-byte words transposed (formats.hpp), and rows of a table by id.
//
//     out[word][row] = source[row][word]
//
// Rows that are missing from the last group are zeros.
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "panel.hpp"
#include "transpose.hpp"

namespace motley::MOTLEY_ISA {
namespace {

struct BlockShape {
    int64_t columns, bytes;
    int half_at, lone_bytes;
};

// The blocks of a group's rows at `rows` (null: zeros) → one group block.
void interleave(const uint8_t* const rows[kGroup], int64_t bytes, const BlockShape& shape, uint8_t* out) {
    const int half_at = shape.half_at, lone_bytes = shape.lone_bytes;
    if (half_at >= 0) {
        for (int r = 0; r < kGroup; r++) {
            uint16_t half = 0;
            if (rows[r]) std::memcpy(&half, rows[r] + half_at, lone_bytes);
            std::memcpy(out + lone_bytes * r, &half, lone_bytes);
        }
        out += lone_bytes * kGroup;
    }
    const int64_t skip = half_at == 0 ? lone_bytes : 0;
    const int64_t n_words = bytes / 4;  // the remainder is a lone scale of one or two bytes
    int64_t n_done = 0;
    bool is_full = true;
    for (int r = 0; r < kGroup; r++) is_full = is_full && rows[r];
    if (is_full)
        for (; n_done + 4 <= n_words; n_done += 4) {
            u32v words[4];
            transpose_words<4>([&](int r) { return rows[r] + skip + 4 * n_done; }, words);
            for (int i = 0; i < 4; i++) store(out + (n_done + i) * kWordBytes, words[i]);
        }
    for (int r = 0; r < kGroup; r++) {
        uint8_t* to = out + n_done * kWordBytes + 4 * r;
        for (int64_t w = n_done; w < n_words; w++, to += kWordBytes) {
            uint32_t value = 0;
            if (rows[r]) std::memcpy(&value, rows[r] + skip + 4 * w, 4);
            std::memcpy(to, &value, 4);
        }
    }
}

// Plain formats have no blocks: 32 columns at a time, fewer at the end of a row.
BlockShape shape_of(int format) {
    if (is_plain(format)) return {kStep, kStep * (format == kF32 ? 4 : 2), -1, 0};
    BlockShape shape{};
    with_quantized(format, [&](auto f) { shape = {f.kColumns, f.kBytes, f.kHalfAt, f.kLoneBytes}; });
    return shape;
}

// New memory is mapped page by page, with a page fault for each. Populating it before the writes is twice as fast. If
// the system does not support the request, it has no effect.
void ask_for_pages([[maybe_unused]] uint8_t* start, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_POPULATE_WRITE)
    constexpr uintptr_t kPage = 4096;  // with larger pages the call fails, which is harmless
    const auto address = reinterpret_cast<uintptr_t>(start), first = address / kPage * kPage;
    madvise(reinterpret_cast<void*>(first), address + bytes - first, MADV_POPULATE_WRITE);
#endif
}

void gather_floats(const GatherArgs& a, const Worker& worker) {
    for (int64_t i; (i = worker.take()) < a.n_ids;) {
        const int32_t id = a.ids[i];
        if (id >= 0 && id < a.n_table_rows)
            std::memcpy(a.out + i * a.n_columns, a.table + id * a.row_bytes, a.n_columns * sizeof(float));
        else
            std::memset(a.out + i * a.n_columns, 0, a.n_columns * sizeof(float));
    }
}

}  // namespace

void repack(const RepackArgs& a, const Worker& worker) {
    const BlockShape shape = shape_of(a.format);
    const int64_t n_groups = (a.n_rows + kGroup - 1) / kGroup, stride = group_bytes(a.format, a.n_columns);
    for (int64_t g; (g = worker.take()) < n_groups;) {
        const uint8_t* rows[kGroup];
        for (int r = 0; r < kGroup; r++) {
            const int64_t row = g * kGroup + r;
            rows[r] = row < a.n_rows ? a.source + row * a.row_bytes : nullptr;
        }
        uint8_t* out = a.out + g * stride;
        ask_for_pages(out, stride);
        for (int64_t done = 0; done < a.row_bytes; done += shape.bytes) {
            const int64_t bytes = a.row_bytes - done < shape.bytes ? a.row_bytes - done : shape.bytes;
            interleave(rows, bytes, shape, out);
            out += bytes * kGroup;
            for (auto& row : rows)
                if (row) row += bytes;
        }
    }
}

void unpack(const UnpackArgs& a, const Worker& worker) {
    auto& panel = *reinterpret_cast<FloatPanel*>(worker.scratch);
    const int64_t n_groups = (a.n_rows + kGroup - 1) / kGroup, stride = group_bytes(a.format, a.n_columns);
    for (int64_t g; (g = worker.take()) < n_groups;)
        for (int64_t first = 0; first < a.n_columns; first += kPanelColumns) {
            const int64_t n = a.n_columns - first < kPanelColumns ? a.n_columns - first : kPanelColumns;
            decode_floats(a.format, a.weight + g * stride, first, n, panel);
            for (int r = 0; r < kGroup && g * kGroup + r < a.n_rows; r++)
                for (int64_t c = 0; c < n; c++) a.out[(g * kGroup + r) * a.n_columns + first + c] = panel.column(c, n)[r];
        }
}

void gather(const GatherArgs& a, const Worker& worker) {
    if (a.format == kF32) return gather_floats(a, worker);
    auto& panel = *reinterpret_cast<FloatPanel*>(worker.scratch);
    uint8_t* packed = worker.scratch + sizeof(FloatPanel);
    static_assert(sizeof(FloatPanel) + kGroup * kPanelColumns * sizeof(float) <= kScratchBytes);  // no block is larger
    const BlockShape shape = shape_of(a.format);
    for (int64_t g; (g = worker.take() * kGroup) < a.n_ids;) {
        const int64_t n_rows = a.n_ids - g < kGroup ? a.n_ids - g : kGroup;
        const uint8_t* rows[kGroup] = {};
        for (int64_t r = 0; r < n_rows; r++) {
            const int32_t id = a.ids[g + r];
            if (id >= 0 && id < a.n_table_rows) rows[r] = a.table + id * a.row_bytes;
        }
        int64_t column = 0;
        for (int64_t done = 0; done < a.row_bytes; done += shape.bytes) {
            const int64_t bytes = a.row_bytes - done < shape.bytes ? a.row_bytes - done : shape.bytes;
            const int64_t n = bytes * shape.columns / shape.bytes;
            interleave(rows, bytes, shape, packed);
            decode_floats(a.format, packed, 0, n, panel);
            for (int64_t r = 0; r < n_rows; r++) {
                float* out = a.out + (g + r) * a.n_columns + column;
                for (int64_t c = 0; c < n; c++) out[c] = rows[r] ? panel.column(c, n)[r] : 0.0f;
            }
            column += n;
            for (auto& row : rows)
                if (row) row += bytes;
        }
    }
}

}  // namespace motley::MOTLEY_ISA
