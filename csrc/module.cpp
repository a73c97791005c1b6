// The native core as a Python module. Tensors come as addresses and sizes, never as torch objects; whoever calls keeps
// the memory alive. Long calls release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "dispatch.hpp"
#include "program.hpp"
#include "team.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace motley {
namespace {

using Address = uintptr_t;

template <class T = float>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The parts of quantized rows, one behind the other.
int64_t quantized_bytes(int64_t n_rows, int64_t n_columns) {
    return aligned(n_rows * n_columns) + 2 * aligned(n_rows * n_columns / 8) + aligned(n_rows * n_columns / 4);
}

Rows rows_at(Address values, int64_t stride, Address quantized, int64_t n_rows, int64_t n_columns) {
    Rows rows{at(values), stride, at<int8_t>(quantized), nullptr, nullptr, nullptr};
    if (quantized) {
        rows.scales = at(quantized + aligned(n_rows * n_columns));
        rows.sums = at(quantized + aligned(n_rows * n_columns) + aligned(n_rows * n_columns / 8));
        rows.half_sums = at(quantized + aligned(n_rows * n_columns) + 2 * aligned(n_rows * n_columns / 8));
    }
    return rows;
}

// The batch's addresses in one group of layers; programs hold on to it, runs fill it.
struct Batch {
    std::vector<SequenceView> sequences;
    BatchView view{};
};

// (first row, rows, position, first key, address of int32 block ids)
using SequenceTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, Address>;

void set_batch(Batch& batch, Address slots, const std::vector<SequenceTuple>& sequences) {
    batch.sequences.clear();
    for (const auto& [first_token, n_tokens, position, first, blocks] : sequences)
        batch.sequences.push_back({first_token, n_tokens, position, first, at<const int32_t>(blocks)});
    batch.view = {at<const int64_t>(slots), batch.sequences.data(), static_cast<int64_t>(batch.sequences.size())};
}

// (kind, codes, high bits, scale, minimum, rows of the plane, first row)
using StoreTuple = std::tuple<int, Address, Address, Address, Address, int64_t, int64_t>;

CacheStoreView store_view(const StoreTuple& t) {
    const auto& [kind, codes, high_bits, scale, minimum, n_rows, first_row] = t;
    return {kind, at<uint8_t>(codes), at<uint8_t>(high_bits), at<uint16_t>(scale), at<uint16_t>(minimum), n_rows, first_row};
}

CacheShape cache_shape(int64_t n_heads, int64_t dim, int64_t block_size) { return {n_heads, dim, (dim + 31) / 32, block_size}; }

// (weight, format, rows, bias, residual, out, out stride)
using PartTuple = std::tuple<Address, int, int64_t, Address, Address, Address, int64_t>;
using Axes = std::array<int64_t, 4>;
// (device, offset, out, shape, source stride, out stride)
using PieceTuple = std::tuple<int, int64_t, Address, Axes, Axes, Axes>;

CopyArgs copy_args(Address source, Address out, const Axes& shape, const Axes& source_stride, const Axes& out_stride) {
    CopyArgs args{at(source), at(out), {}, {}, {}};
    for (int i = 0; i < 4; i++) {
        args.shape[i] = shape[i];
        args.source_stride[i] = source_stride[i];
        args.out_stride[i] = out_stride[i];
    }
    return args;
}

void bind_program(nb::module_& m) {
    nb::class_<Program>(m, "Program", "A list of kernel calls. Work estimates are nanoseconds of one thread.")
        .def(nb::init<std::shared_ptr<Pool>>(), "pool"_a)
        .def("run", &Program::run, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("n_steps", &Program::n_steps)
        .def("quantize", [](Program& p, Address x, int64_t stride, Address quantized, int64_t n_rows, int64_t n_columns) {
            p.add_kernel(p.kernels().quantize, QuantizeArgs{rows_at(x, stride, quantized, n_rows, n_columns), n_rows, n_columns},
                         0.2 * n_rows * n_columns);
        })
        .def("norm", [](Program& p, Address x, Address weight, Address out, Address quantized, int64_t n_rows, int64_t n_columns, float eps) {
            p.add_kernel(p.kernels().norm, NormArgs{at(x), at(weight), at(out), rows_at(0, 0, quantized, n_rows, n_columns), n_rows, n_columns, eps},
                         n_rows < 2 ? 0 : 0.4 * n_rows * n_columns);
        })
        .def("matmul", [](Program& p, Address x, int64_t stride, Address quantized, int64_t n_tokens, int64_t n_columns,
                          const std::vector<PartTuple>& parts, int gate, bool is_exact) {
            MatMulArgs args{rows_at(x, stride, quantized, n_tokens, n_columns), n_tokens, n_columns, 0, {}, gate, is_exact};
            if (parts.size() > kMaxParts) throw std::invalid_argument("too many parts");
            double n_products = 0;
            for (const auto& [weight, format, n_rows, bias, residual, out, out_stride] : parts) {
                args.parts[args.n_parts++] = {at<uint8_t>(weight), format, n_rows, at(bias), at(residual), at(out), out_stride};
                n_products += 1.0 * n_rows * n_columns * n_tokens;
            }
            p.add_kernel(p.kernels().matmul, args, n_products / 16);
        })
        .def("rope_table", [](Program& p, Address positions, Address frequencies, Address table, int64_t n_tokens, int64_t n_pairs, float magnitude) {
            p.add_kernel(p.kernels().rope_table, RopeTableArgs{at<int32_t>(positions), at(frequencies), at(table), n_tokens, n_pairs, magnitude},
                         20.0 * n_tokens * n_pairs);
        })
        .def("rope", [](Program& p, Address x, Address out, Address table, int64_t n_tokens, int64_t n_heads, int64_t dim, int64_t n_pairs,
                        bool is_interleaved, int rotation) {
            p.add_kernel(p.kernels().rope, RopeArgs{at(x), at(out), at(table), n_tokens, n_heads, dim, n_pairs, is_interleaved, rotation},
                         n_tokens < 2 ? 0 : 1.0 * n_tokens * n_heads * dim);
        })
        .def("hadamard", [](Program& p, Address x, Address out, int64_t n_rows, int size) {
            p.add_kernel(p.kernels().hadamard, HadamardArgs{at(x), at(out), n_rows, size}, 1.0 * n_rows * size);
        })
        .def("binary", [](Program& p, Address a, Address b, Address out, int64_t n, int64_t b_inner, int64_t b_repeat, bool is_product) {
            p.add_kernel(p.kernels().binary, BinaryArgs{at(a), at(b), at(out), n, b_inner, b_repeat, is_product}, 0.2 * n);
        })
        .def("unary", [](Program& p, Address x, Address out, int64_t n, int function, float factor) {
            p.add_kernel(p.kernels().unary, UnaryArgs{at(x), at(out), n, function, factor}, 0.5 * n);
        })
        .def("softmax", [](Program& p, Address x, Address out, int64_t n_rows, int64_t n_columns) {
            p.add_kernel(p.kernels().softmax, SoftmaxArgs{at(x), at(out), n_rows, n_columns}, 1.0 * n_rows * n_columns);
        })
        .def("copy", [](Program& p, Address source, Address out, const Axes& shape, const Axes& source_stride, const Axes& out_stride) {
            p.add_kernel(p.kernels().copy, copy_args(source, out, shape, source_stride, out_stride),
                         0.2 * shape[0] * shape[1] * shape[2] * shape[3]);
        })
        .def("gather", [](Program& p, Address table, int format, int64_t row_bytes, int64_t n_table_rows, Address ids, int64_t n_ids,
                          int64_t n_columns, Address out) {
            p.add_kernel(p.kernels().gather,
                         GatherArgs{at<uint8_t>(table), format, row_bytes, n_table_rows, at<int32_t>(ids), n_ids, n_columns, at(out)},
                         n_ids > 16 ? 1.0 * n_ids * n_columns : 0);
        })
        .def("local_ids", [](Program& p, Address ids, Address out, int64_t n, const std::vector<std::tuple<int64_t, int64_t>>& ranges) {
            if (ranges.size() > kMaxRanges) throw std::invalid_argument("too many ranges");
            LocalIdsArgs args{at<int32_t>(ids), at<int32_t>(out), n, 0, {}, {}};
            for (const auto& [start, stop] : ranges) {
                args.start[args.n_ranges] = start;
                args.stop[args.n_ranges++] = stop;
            }
            p.add_kernel(p.kernels().local_ids, args, 0);
        })
        .def("cache_write", [](Program& p, Address keys, Address values, int64_t n_tokens, int64_t n_heads, int64_t dim, int64_t block_size,
                               const StoreTuple& k, const StoreTuple& v, int k_rotation, int v_rotation, const std::shared_ptr<Batch>& batch) {
            const CacheWriteArgs args{at(keys), at(values), n_tokens, cache_shape(n_heads, dim, block_size), store_view(k), store_view(v),
                                      k_rotation, v_rotation, &batch->view};
            p.add_kernel(p.kernels().cache_write, args, 4.0 * n_tokens * n_heads * dim);
        })
        .def("attention", [](Program& p, Address q, Address out, int64_t n_tokens, int64_t n_heads, int64_t n_kv_heads, int64_t dim,
                             int64_t block_size, const StoreTuple& k, const StoreTuple& v, float scale, int64_t window, int out_rotation,
                             const std::shared_ptr<Batch>& batch, Address partial, int64_t n_partial, int n_threads) {
            const AttentionArgs args{at(q), at(out), n_tokens, n_heads, cache_shape(n_kv_heads, dim, block_size), store_view(k), store_view(v),
                                     scale, window, out_rotation, &batch->view, at(partial), n_partial, n_threads};
            // The context's length is data: count on some.
            const double work = 20.0 * n_tokens * n_heads * dim;
            p.add_kernel(p.kernels().attention, args, work);
            if (n_partial) p.add_kernel(p.kernels().attention_join, args, 0);
        })
        .def("all_reduce", [](Program& p, const std::shared_ptr<Group>& group, int device, Address x, Address out, int64_t n) {
            p.add_all_reduce(group, device, at(x), at(out), n);
        })
        .def("send", [](Program& p, const std::shared_ptr<Group>& group, int device, int target, Address x, int64_t n) {
            p.add_send(group, device, target, at(x), n);
        })
        .def("receive", [](Program& p, const std::shared_ptr<Group>& group, int device, int source, Address out) {
            p.add_receive(group, device, source, at(out));
        })
        .def("exchange", [](Program& p, const std::shared_ptr<Group>& group, int device, Address x, const std::vector<PieceTuple>& pieces) {
            std::vector<Program::Piece> list;
            for (const auto& [source, offset, out, shape, source_stride, out_stride] : pieces)
                list.push_back({source, offset, copy_args(0, out, shape, source_stride, out_stride)});
            p.add_exchange(group, device, at(x), std::move(list));
        });
}

void repack(Pool& pool, Address source, Address out, int format, int64_t n_rows, int64_t n_columns, int64_t row_bytes) {
    pool.run_kernel(pool.kernels().repack, RepackArgs{at<uint8_t>(source), at<uint8_t>(out), format, n_rows, n_columns, row_bytes});
}

void unpack(Pool& pool, Address weight, Address out, int format, int64_t n_rows, int64_t n_columns) {
    pool.run_kernel(pool.kernels().unpack, UnpackArgs{at<uint8_t>(weight), at(out), format, n_rows, n_columns});
}

}  // namespace
}  // namespace motley

NB_MODULE(_core, m) {
    using namespace motley;
    m.doc() = "Motley's native core";
    nb::set_leak_warnings(false);  // what still lives when the interpreter ends is not lost
    m.def("instruction_sets", &instruction_sets, "What this machine can run, best first.");
    m.def("quantized_bytes", &quantized_bytes, "n_rows"_a, "n_columns"_a, "Bytes of rows quantized for a matrix product.");
    nb::class_<Pool>(m, "Pool", "Threads that run programs together; the caller is one of them.")
        .def(nb::init<int, const std::string&, std::vector<int>>(), "n_threads"_a, "instruction_set"_a = "", "cores"_a = std::vector<int>{})
        .def_prop_ro("n_threads", &Pool::n_threads)
        .def_prop_ro("instruction_set", [](const Pool& pool) { return std::string(pool.kernels().name); })
        .def("repack", &repack, nb::call_guard<nb::gil_scoped_release>())
        .def("unpack", &unpack, nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Batch>(m, "Batch", "Where a batch reads and writes in one group of cache layers.")
        .def(nb::init<>())
        .def("set", &set_batch, "slots"_a, "sequences"_a);
    nb::class_<Group>(m, "Group", "Where programs of several devices meet.")
        .def(nb::init<int>(), "n_devices"_a)
        .def_prop_ro("n_devices", &Group::n_devices)
        .def("abort", &Group::abort)
        .def("reset", &Group::reset);
    nb::exception<HungUp>(m, "HungUpError");
    bind_program(m);
    nb::class_<Team>(m, "Team", "Runs the programs of several devices at the same time; the first on the caller's thread.")
        .def(nb::init<int>(), "n_devices"_a)
        .def("run", &Team::run, "programs"_a, nb::call_guard<nb::gil_scoped_release>());
}
