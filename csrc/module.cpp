// The native core as a Python module. Tensors are passed as addresses and sizes, never as torch objects; the caller
// keeps the memory alive. Long calls release the GIL.
#include <algorithm>

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "addresses.hpp"
#include "batch.hpp"
#include "dispatch.hpp"
#include "drafting.hpp"
#include "expert_ffn.hpp"
#include "lookup.hpp"
#include "names.hpp"
#include "program.hpp"
#include "sampling.hpp"
#include "shared_group.hpp"
#include "steady.hpp"
#include "team.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace motley {
namespace {

// (first row, rows, position, first key, int32 block ids in a buffer)
using SequenceTuple = std::tuple<int64_t, int64_t, int64_t, int64_t, nb::object>;

// Appends the int32 values of a Python buffer: an array or a numpy array.
void append_ints(nb::handle source, std::vector<int32_t>& out) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(source.ptr(), &buffer, PyBUF_CONTIG_RO) != 0) throw nb::python_error();
    const bool is_int32 = buffer.itemsize == sizeof(int32_t);
    const auto* values = static_cast<const int32_t*>(buffer.buf);
    if (is_int32) out.insert(out.end(), values, values + buffer.len / buffer.itemsize);
    PyBuffer_Release(&buffer);
    if (!is_int32) throw std::invalid_argument("block ids are int32");
}

void place_batch(Batch& batch, int64_t block_size, const std::vector<SequenceTuple>& sequences) {
    batch.clear(block_size);
    for (const auto& [first_token, n_tokens, position, first, blocks] : sequences) {
        append_ints(blocks, batch.blocks());
        batch.add(first_token, n_tokens, position, first);
    }
    batch.finish();
}

// Writes integers to an input of a program, which has room for `n_room` of them.
void put(Address target, int64_t n_room, const std::vector<int32_t>& numbers) {
    if (static_cast<int64_t>(numbers.size()) > n_room) throw std::invalid_argument("more numbers than the program was made for");
    std::copy(numbers.begin(), numbers.end(), at<int32_t>(target));
}

// The batch's states. Programs keep a reference to it; each run sets its contents.
struct StateBatch {
    StateBatchView view{};
};

// (states, whether they are bfloat16, rings, pending tokens of a ring)
using StateTuple = std::tuple<Address, bool, Address, int64_t>;

StateStore state_store(const StateTuple& t, const StateBatch& batch) {
    const auto& [states, is_bf16, rings, n_pending] = t;
    if (n_pending < 1) throw std::invalid_argument("a ring without tokens");
    return {at<void>(states), is_bf16, at(rings), n_pending, &batch.view};
}

// (kind, codes, high bits, scale, minimum, rows of the plane, first row)
using StoreTuple = std::tuple<int, Address, Address, Address, Address, int64_t, int64_t>;

CacheStoreView store_view(const StoreTuple& t) {
    const auto& [kind, codes, high_bits, scale, minimum, n_rows, first_row] = t;
    return {kind, at<uint8_t>(codes), at<uint8_t>(high_bits), at<uint16_t>(scale), at<uint16_t>(minimum), n_rows, first_row};
}

CacheShape cache_shape(int64_t n_heads, int64_t dim, int64_t block_size) { return {n_heads, dim, (dim + 31) / 32, block_size}; }

// Kernels of the cache keep a head, and the queries of a KV head, in scratch memory of fixed size.
CacheShape require_cache_shape(int64_t n_heads, int64_t dim, int64_t block_size, int64_t n_query_heads) {
    if (dim < 1 || dim > kMaxHeadDim) throw std::invalid_argument("a head's dims do not fit into the scratch memory");
    if (n_query_heads > n_heads * kMaxQueryGroup) throw std::invalid_argument("too many query heads for a KV head");
    return cache_shape(n_heads, dim, block_size);
}

// Weights and activations are read in blocks of this many columns.
void require_whole_steps(int64_t n_columns, Address quantized) {
    if (quantized && n_columns % 32) throw std::invalid_argument("quantized rows have a multiple of 32 columns");
}

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

std::vector<Program::Piece> piece_list(const std::vector<PieceTuple>& pieces) {
    std::vector<Program::Piece> list;
    for (const auto& [source, offset, out, shape, source_stride, out_stride] : pieces)
        list.push_back({source, offset, copy_args(0, out, shape, source_stride, out_stride)});
    return list;
}

void bind_program(nb::module_& m) {
    nb::class_<Program>(m, "Program", "A list of kernel calls. Work estimates are nanoseconds of one thread.")
        .def(nb::init<std::shared_ptr<Pool>>(), "pool"_a)
        .def("run", &Program::run, "n_tokens"_a = -1, "n_outputs"_a = -1, nb::call_guard<nb::gil_scoped_release>())
        .def("set_batch", &Program::set_batch, "n_tokens"_a, "n_outputs"_a, "How many rows the next run with others is for.")
        .def("set_rows", &Program::set_rows, "kind"_a, "n_planned"_a,
             "What the kernels added from now on work on: 0 all rows, 1 tokens, 2 outputs; and how many there are at most.")
        .def_prop_ro("n_steps", &Program::n_steps)
        .def("quantize", [](Program& p, Address x, int64_t stride, Address quantized, int64_t n_rows, int64_t n_columns) {
            require_whole_steps(n_columns, quantized);
            p.add_kernel(p.kernels().quantize, QuantizeArgs{rows_at(x, stride, quantized, n_rows, n_columns), n_rows, n_columns},
                         0.2 * n_rows * n_columns);
        })
        .def("norm", [](Program& p, Address x, Address weight, Address out, Address quantized, int64_t n_rows, int64_t n_columns, float eps) {
            require_whole_steps(n_columns, quantized);
            p.add_kernel(p.kernels().norm, NormArgs{at(x), at(weight), at(out), rows_at(0, 0, quantized, n_rows, n_columns), n_rows, n_columns, eps},
                         n_rows < 2 ? 0 : 0.4 * n_rows * n_columns);
        })
        .def("matmul", [](Program& p, Address x, int64_t stride, Address quantized, int64_t n_tokens, int64_t n_columns,
                          const std::vector<PartTuple>& parts, int gate, bool is_exact) {
            MatMulArgs args{rows_at(x, stride, quantized, n_tokens, n_columns), n_tokens, n_columns, 0, {}, gate, is_exact};
            if (parts.size() > kMaxParts) throw std::invalid_argument("too many parts");
            double n_products = 0;
            for (const auto& [weight, format, n_rows, bias, residual, out, out_stride] : parts) {
                args.parts[args.n_parts++] = {at<uint8_t>(weight), format, n_rows, at(bias), at(residual), at(out), out_stride, p.pattern(format)};
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
            const CacheWriteArgs args{at(keys), at(values), n_tokens, require_cache_shape(n_heads, dim, block_size, n_heads), store_view(k), store_view(v),
                                      k_rotation, v_rotation, &batch->view};
            p.add_kernel(p.kernels().cache_write, args, 4.0 * n_tokens * n_heads * dim);
        })
        .def("attention", [](Program& p, Address q, Address out, int64_t n_tokens, int64_t n_heads, int64_t n_kv_heads, int64_t dim,
                             int64_t block_size, const StoreTuple& k, const StoreTuple& v, float scale, int64_t window, int out_rotation,
                             const std::shared_ptr<Batch>& batch, Address partial, int64_t n_partial, int n_threads, Address sinks) {
            const CacheShape shape = require_cache_shape(n_kv_heads, dim, block_size, n_heads);
            const AttentionArgs args{at(q), at(out), n_tokens, n_heads, shape, store_view(k), store_view(v),
                                     scale, window, out_rotation, &batch->view, at(partial), n_partial, n_threads, at(sinks)};
            // The context's length is not known here: assume a typical one.
            const double work = 20.0 * n_tokens * n_heads * dim;
            p.add_kernel(p.kernels().attention, args, work);
            if (n_partial) p.add_kernel(p.kernels().attention_join, args, 0);
        })
        .def("route", [](Program& p, Address logits, Address n_used, Address bias, Address ids, int64_t n_tokens, int64_t n_experts,
                         int64_t k, int64_t n_groups, int64_t n_groups_used, bool is_sigmoid) {
            if (n_groups > kMaxExpertGroups) throw std::invalid_argument("too many groups of experts");
            p.add_kernel(p.kernels().route,
                         RouteArgs{at(logits), at<int32_t>(n_used), at(bias), at<int32_t>(ids), n_tokens, n_experts, k, n_groups,
                                   n_groups_used, is_sigmoid},
                         n_tokens < 2 ? 0 : 1.0 * n_tokens * n_experts * k);
        })
        .def("route_weights", [](Program& p, Address logits, Address ids, Address out, int64_t n_tokens, int64_t n_experts, int64_t k,
                                 bool is_sigmoid, bool normalizes, float scale) {
            p.add_kernel(p.kernels().route_weights,
                         RouteWeightsArgs{at(logits), at<int32_t>(ids), at(out), n_tokens, n_experts, k, is_sigmoid, normalizes, scale},
                         n_tokens < 2 ? 0 : 10.0 * n_tokens * k);
        })
        .def("expert_ffn", [](Program& p, Address x, Address quantized, int64_t n_tokens, int64_t n_columns, Address ids, Address weights,
                              int64_t k, int64_t n_experts, const std::array<ExpertTuple, 3>& parts, int gate, Address residual,
                              Address out, Address room, bool takes_values, bool takes_codes_of_hidden, bool is_exact) {
            ExpertFfn{x, quantized, n_tokens, n_columns, ids, weights, k, n_experts, parts, gate, residual, out, room, takes_values,
                      takes_codes_of_hidden, is_exact}
                .add_to(p);
        })
        .def("causal_conv", [](Program& p, Address x, Address weight, Address out, int64_t n_tokens, int64_t n_channels, int64_t n_taps,
                               const StateTuple& store, const std::shared_ptr<StateBatch>& batch) {
            if (n_taps < 2 || n_taps > kMaxTaps) throw std::invalid_argument("too many taps of a convolution, or too few");
            p.add_kernel(p.kernels().causal_conv, CausalConvArgs{at(x), at(weight), at(out), n_channels, n_taps, state_store(store, *batch)},
                         0.3 * n_tokens * n_channels * n_taps);
        }, nb::keep_alive<1, 9>())
        .def("delta_net", [](Program& p, Address mixed, Address decay, Address beta, Address out, int64_t n_tokens, int64_t n_key_heads,
                             int64_t n_heads, int64_t key_dim, int64_t value_dim, float eps, bool is_cyclic, const StateTuple& store,
                             const std::shared_ptr<StateBatch>& batch) {
            if (n_key_heads < 1 || n_heads % n_key_heads || key_dim > kMaxHeadDim || value_dim > kMaxHeadDim)
                throw std::invalid_argument("no such heads of a delta net");
            const DeltaNetArgs args{at(mixed), at(decay), at(beta), at(out), n_key_heads, n_heads, key_dim, value_dim, eps, is_cyclic,
                                    state_store(store, *batch)};
            p.add_kernel(p.kernels().delta_net, args, 0.3 * n_tokens * n_heads * key_dim * value_dim);
            p.add_kernel(p.kernels().delta_pending, args, 0);
        }, nb::keep_alive<1, 14>())
        .def("all_reduce", [](Program& p, const std::shared_ptr<Group>& group, int device, Address x, Address out, int64_t n) {
            p.add_all_reduce(group, device, at(x), at(out), n);
        })
        .def("send", [](Program& p, const std::shared_ptr<Group>& group, int device, int target, Address x, int64_t n) {
            p.add_send(group, device, target, at(x), n);
        })
        .def("receive", [](Program& p, const std::shared_ptr<Group>& group, int device, int source, Address out, int64_t n) {
            p.add_receive(group, device, source, at(out), n);
        }, "group"_a, "device"_a, "source"_a, "out"_a, "n"_a = -1)
        .def("exchange", [](Program& p, const std::shared_ptr<Group>& group, int device, Address x,
                            const std::vector<PieceTuple>& pieces, std::vector<int64_t> counts) {
            p.add_exchange(group, device, at(x), piece_list(pieces), std::move(counts));
        }, "group"_a, "device"_a, "x"_a, "pieces"_a, "counts"_a = std::vector<int64_t>{})
        .def("advance", [](Program& p, const std::shared_ptr<TaggedMemory>& memory) { p.add_advance(memory); })
        .def("post", [](Program& p, const std::shared_ptr<TaggedMemory>& memory, int64_t place, Address x, int64_t n) {
            p.add_post(memory, place, at(x), n);
        })
        .def("await_message", [](Program& p, const std::shared_ptr<TaggedMemory>& memory, int64_t place, Address out, int64_t n, Address addend) {
            p.add_await(memory, place, at(out), n, at(addend));
        })
        .def("await_pieces", [](Program& p, const std::shared_ptr<TaggedMemory>& memory, int64_t place, int64_t n, int device, Address x,
                                const std::vector<PieceTuple>& pieces) {
            p.add_tagged_pieces(memory, place, n, device, at(x), piece_list(pieces));
        });
}

// Weights are read from one end to the other for each token: with huge pages, if the system has them, there are
// fewer TLB misses, and speed depends less on the pages' addresses.
void ask_for_huge_pages([[maybe_unused]] Address start, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr Address kHuge = 2 << 20;
    const Address first = (start + kHuge - 1) / kHuge * kHuge, stop = (start + bytes) / kHuge * kHuge;
    if (first < stop) madvise(at<void>(first), stop - first, MADV_HUGEPAGE);
#endif
}

void repack(Pool& pool, Address source, Address out, int format, int64_t n_rows, int64_t n_columns, int64_t row_bytes) {
    ask_for_huge_pages(out, n_rows * row_bytes);
    pool.run_kernel(pool.kernels().repack, RepackArgs{at<uint8_t>(source), at<uint8_t>(out), format, n_rows, n_columns, row_bytes});
}

void unpack(Pool& pool, Address weight, Address out, int format, int64_t n_rows, int64_t n_columns) {
    pool.run_kernel(pool.kernels().unpack, UnpackArgs{at<uint8_t>(weight), at(out), format, n_rows, n_columns});
}

RowSampler row_sampler(double temperature, int64_t top_k, double top_p, double min_p, uint64_t key) {
    if (!(temperature >= 0) || (temperature > 0 && (top_k < 1 || top_k > kMaxTopK)) || !(min_p <= 1))
        throw std::invalid_argument("no such sampler");
    return {temperature, top_k, top_p, min_p, key};
}

void require_samplers(const std::vector<const RowSampler*>& samplers, const std::vector<int64_t>& indexes, int64_t n_columns) {
    if (samplers.size() != indexes.size() || n_columns < 1) throw std::invalid_argument("a sampler and an index for each row");
    for (const RowSampler* each : samplers)
        if (!each) throw std::invalid_argument("a row without a sampler");
}

std::vector<int32_t> choose(Address logits, int64_t n_columns, const std::vector<const RowSampler*>& samplers,
                            const std::vector<int64_t>& indexes) {
    require_samplers(samplers, indexes, n_columns);
    std::vector<int32_t> tokens(samplers.size());
    choose_tokens(at(logits), static_cast<int64_t>(samplers.size()), n_columns, samplers.data(), indexes.data(), tokens.data());
    return tokens;
}

// (program, address of its tokens, of its positions, its batches); an address may be 0
using DraftTuple = std::tuple<Program*, Address, Address, std::vector<Batch*>>;

std::vector<std::vector<int32_t>> draft(Team& team, const std::vector<DraftTuple>& devices, Address logits, int64_t n_columns,
                                        const std::vector<const RowSampler*>& samplers, const std::vector<int64_t>& indexes, int n_rounds) {
    require_samplers(samplers, indexes, n_columns);
    std::vector<DraftProgram> programs;
    for (const auto& [program, tokens, positions, batches] : devices)
        programs.push_back({program, at<int32_t>(tokens), at<int32_t>(positions), batches});
    nb::gil_scoped_release release;
    return draft_tokens(team, programs, at(logits), n_columns, samplers, indexes, n_rounds);
}

// (program, addresses of its tokens, positions and output rows, numbers of each sequence by address, its batches by group);
// an address may be 0
using SteadyTuple = std::tuple<Program*, Address, Address, Address, std::vector<std::tuple<Address, std::vector<int32_t>>>,
                               std::vector<std::tuple<size_t, Batch*>>>;

void make_steady(SteadyBatch* self, size_t n_sequences, size_t n_groups, int64_t n_columns, const std::vector<const RowSampler*>& samplers) {
    for (const RowSampler* each : samplers)
        if (!each) throw std::invalid_argument("a sequence without a sampler");
    new (self) SteadyBatch(n_sequences, n_groups, n_columns, samplers);
}

void add_programs(SteadyBatch& self, int64_t max_rows, const std::vector<SteadyTuple>& devices, Address logits) {
    std::vector<SteadyDevice> list;
    for (const auto& [program, tokens, positions, output_rows, others, slots] : devices) {
        if (!program) throw std::invalid_argument("a device without a program");
        SteadyDevice& device = list.emplace_back(SteadyDevice{program, at<int32_t>(tokens), at<int32_t>(positions), at<int32_t>(output_rows), {}, {}});
        for (const auto& [target, numbers] : others) device.others.push_back({at<int32_t>(target), numbers});
        for (const auto& [group, slot] : slots) device.slots.emplace_back(group, slot);
    }
    self.add({max_rows, std::move(list), at(logits)});
}

// (row, tokens, length of the match)
using ContinuationTuple = std::tuple<size_t, std::vector<int32_t>, int64_t>;

// Takes the tokens of each answer that its index does not have yet, and finds continuations of the texts that have one.
std::vector<ContinuationTuple> look_up(const std::vector<TextIndex*>& indexes, const std::vector<nb::list>& answers, int64_t n_max) {
    if (indexes.size() != answers.size()) throw std::invalid_argument("an answer for each index");
    std::vector<ContinuationTuple> found;
    for (size_t row = 0; row < indexes.size(); row++) {
        if (!indexes[row]) throw std::invalid_argument("no index");
        TextIndex& index = *indexes[row];
        for (size_t i = static_cast<size_t>(index.n_generated()); i < answers[row].size(); i++) index.append(nb::cast<int32_t>(answers[row][i]));
        index.index();
        auto [tokens, n_match] = index.continuation(n_max);
        if (!tokens.empty()) found.emplace_back(row, std::move(tokens), n_match);
    }
    return found;
}

nb::dict numbers(const std::vector<Named>& names) {
    nb::dict result;
    for (const Named& each : names) result[each.name.c_str()] = each.number;
    return result;
}

}  // namespace
}  // namespace motley

NB_MODULE(_core, m) {
    using namespace motley;
    m.doc() = "Motley's native core";
    nb::set_leak_warnings(false);  // objects that are alive at interpreter exit are no leaks
    m.attr("FORMATS") = numbers(kFormatNames);
    m.attr("ROW_FORMATS") = numbers(kRowFormatNames);
    m.attr("FUNCTIONS") = numbers(kFunctionNames);
    m.attr("CACHE_TYPES") = numbers(kCacheTypeNames);
    m.attr("MAX_PARTS") = static_cast<int>(kMaxParts);
    m.attr("MAX_RANGES") = static_cast<int>(kMaxRanges);
    m.def("instruction_sets", &instruction_sets, "What this machine can run, best first.");
    m.def("expert_bytes", [](int64_t n_tokens, int64_t k, int64_t n_columns, int64_t n_hidden, int64_t n_experts) {
        return ExpertRoom(n_tokens, k, n_columns, n_hidden, n_experts).size;
    }, "Bytes of room that an expert FFN needs.");
    m.def("quantized_bytes", &quantized_bytes, "n_rows"_a, "n_columns"_a, "Bytes of rows quantized for a matrix product.");
    nb::class_<Pool>(m, "Pool", "Threads that run programs together; the caller is one of them.")
        .def(nb::init<int, const std::string&, std::vector<int>>(), "n_threads"_a, "instruction_set"_a = "", "cores"_a = std::vector<int>{})
        .def_prop_ro("n_threads", &Pool::n_threads)
        .def_prop_ro("instruction_set", [](const Pool& pool) { return std::string(pool.kernels().name); })
        .def("set_pattern", [](Pool& pool, int format, int streams, int fetch_ahead, int first_share, int is_once) {
            if (format < 0 || format >= kNumFormats || streams < 1 || streams > kMaxStreams || fetch_ahead < 0 || first_share < 0 || first_share > 100 || is_once < 0 || is_once > 1)
                throw std::invalid_argument("no such reading pattern");
            pool.patterns[format] = {streams, fetch_ahead, first_share, is_once == 1};
        }, "format"_a, "streams"_a, "fetch_ahead"_a, "first_share"_a, "is_once"_a = 0, "How programs that are made from now on read weights of a format.")
        .def("repack", &repack, nb::call_guard<nb::gil_scoped_release>())
        .def("unpack", &unpack, nb::call_guard<nb::gil_scoped_release>());
    m.attr("MAX_TOP_K") = kMaxTopK;
    m.attr("NONE_LEFT") = static_cast<int>(kNoneLeft);
    m.attr("NOT_FINITE") = static_cast<int>(kNotFinite);
    nb::class_<RowSampler>(m, "RowSampler", "Sampling parameters of one request; temperature 0: the largest logit.")
        .def(nb::new_(&row_sampler), "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "key"_a);
    m.def("put", &put, "target"_a, "n_room"_a, "numbers"_a, "Writes int32 numbers to an input of a program.");
    m.def("choose", &choose, "logits"_a, "n_columns"_a, "samplers"_a, "indexes"_a,
          "A token for each row of logits, NONE_LEFT or NOT_FINITE.");
    nb::class_<Batch>(m, "Batch", "Where a batch reads and writes in one group of cache layers.")
        .def(nb::init<>())
        .def("place", &place_batch, "block_size"_a, "sequences"_a)
        .def("set_tree", &Batch::set_tree, "sequence"_a, "seen"_a);
    nb::class_<SteadyBatch>(m, "SteadyBatch", "The same sequences in step after step.")
        .def("__init__", &make_steady, "n_sequences"_a, "n_groups"_a, "n_columns"_a, "samplers"_a)
        .def("add", &add_programs, "max_rows"_a, "devices"_a, "logits"_a, "Adds the programs for steps of up to so many rows.")
        .def("place", [](SteadyBatch& steady, size_t group, int64_t block_size, const std::vector<SequenceTuple>& sequences) {
            place_batch(steady.tables(group), block_size, sequences);
        }, "group"_a, "block_size"_a, "sequences"_a, "Sets the block tables of a group of cache layers.");
    nb::class_<TextIndex>(m, "TextIndex", "The places of every three tokens of a text.")
        .def(nb::init<std::vector<int32_t>>(), "prompt"_a)
        .def_prop_ro("n_left", &TextIndex::n_left, "Tokens that are not indexed yet.")
        .def("index", &TextIndex::index, "n_max"_a = TextIndex::kPortion, nb::call_guard<nb::gil_scoped_release>(),
             "Indexes up to n_max of the tokens that are not indexed yet. No other thread may use the index meanwhile.");
    m.def("look_up", &look_up, "indexes"_a, "answers"_a, "n_max"_a,
          "Up to n_max tokens that may follow each text: (row, tokens, length of the match) for those that have any.");
    nb::class_<StateBatch>(m, "StateBatch", "Where a batch reads and writes recurrent states.")
        .def(nb::init<>())
        .def("set", [](StateBatch& batch, Address spans, int64_t n_spans) { batch.view = {at<const StateSpan>(spans), n_spans}; },
             "spans"_a, "n_spans"_a, "Nine int64 for each sequence, see kernels.hpp.");
    nb::class_<Group>(m, "AnyGroup", "Where programs of several devices exchange data.")
        .def_prop_ro("n_devices", &Group::n_devices)
        .def("show", [](Group& group, int device, Address values, const std::vector<int64_t>& counts) {
            return group.show(device, at(values), counts);
        }, nb::call_guard<nb::gil_scoped_release>())
        .def("part", [](const Group& group, int device, int source) { return reinterpret_cast<Address>(group.part(device, source)); })
        .def("leave", &Group::leave, nb::call_guard<nb::gil_scoped_release>())
        .def("send", [](Group& group, int source, int target, Address x, int64_t n) { return group.send(source, target, at(x), n); },
             nb::call_guard<nb::gil_scoped_release>())
        .def("receive", [](Group& group, int source, int target, Address out, int64_t n) { return group.receive(source, target, at(out), n); },
             nb::call_guard<nb::gil_scoped_release>())
        .def("abort", &Group::abort)
        .def("reset", &Group::reset);
    nb::class_<LocalGroup, Group>(m, "Group", "A group of devices of this process.").def(nb::init<int>(), "n_devices"_a);
    nb::class_<SharedGroup, Group>(m, "SharedGroup", "A group of devices in several processes of this machine.")
        .def(nb::init<int, int64_t, int>(), "file"_a, "offset"_a, "n_devices"_a)
        .def_static("n_bytes", &SharedGroup::n_bytes, "n_devices"_a);
    nb::class_<TaggedMemory>(m, "TaggedMemory", "Messages between programs and a device that takes part by itself.")
        .def("__init__", [](TaggedMemory* self, Address incoming, Address outgoing, Address abort_word) {
            new (self) TaggedMemory(at<uint64_t>(incoming), at<uint64_t>(outgoing), at<uint32_t>(abort_word));
        }, "incoming"_a, "outgoing"_a, "abort_word"_a)
        .def_prop_ro("tag", &TaggedMemory::tag)
        .def("abort", &TaggedMemory::abort)
        .def("reset", &TaggedMemory::reset, "tag"_a);
    nb::exception<Aborted>(m, "AbortedError");
    bind_program(m);
    nb::class_<Team>(m, "Team", "Runs the programs of several devices at the same time; the first on the caller's thread.")
        .def(nb::init<int>(), "n_devices"_a)
        .def("run", &Team::run, "programs"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("draft", &draft, "devices"_a, "logits"_a, "n_columns"_a, "samplers"_a, "indexes"_a, "n_rounds"_a,
             "Tokens of several rounds for each row, each of which is the input of the next round.")
        .def("steps", [](Team& team, SteadyBatch& steady, std::vector<int32_t> tokens, std::vector<int32_t> positions,
                        std::vector<int64_t> indexes, int n_rounds, const std::vector<int32_t>& stops) {
            return steady.run(team, std::move(tokens), std::move(positions), std::move(indexes), n_rounds, stops);
        }, "steady"_a, "tokens"_a, "positions"_a, "indexes"_a, "n_rounds"_a = 1, "stops"_a = std::vector<int32_t>(),
             nb::call_guard<nb::gil_scoped_release>(),
             "Runs a steady batch, and returns the tokens of each round, each of which is the input of the next.")
        .def("rows", [](Team& team, SteadyBatch& steady, const std::vector<int32_t>& tokens, const std::vector<int32_t>& counts,
                        const std::vector<int32_t>& positions, const std::vector<int64_t>& indexes) {
            return steady.run_rows(team, tokens, counts, positions, indexes);
        }, "steady"_a, "tokens"_a, "counts"_a, "positions"_a, "indexes"_a, nb::call_guard<nb::gil_scoped_release>(),
             "Runs `counts` tokens of each sequence of a steady batch, and returns the token after each of them.");
}
