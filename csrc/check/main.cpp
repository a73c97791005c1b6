// Compares every kernel with its reference (reference.hpp) on odd shapes, for every instruction set of this machine
// and with several threads. `make sanitize` builds it with sanitizers: memory is allocated with its exact size, so that
// a read past the end is found. `make check-arm` runs it in an emulator.
#include "../dispatch.hpp"
#include "check.hpp"
#include "rounds.hpp"

int main() {
    using namespace motley;
    for (const auto& name : instruction_sets()) {
        Pool pool(3, name, {});
        for (const auto& shape : kFormats) check_products(pool, shape);
        check_rows_of_files(pool);
        for (int kind = kCacheF32; kind <= kCacheIQ4_NL; kind++)
            for (const int64_t block_size : {int64_t{16}, int64_t{5}}) check_attention(pool, kind, block_size, block_size == 5);
        for (const int kind : {kCacheF32, kCacheQ8_0, kCacheQ5_1}) check_widest_heads(pool, kind);
        check_values(pool);
        check_long_rows(pool);
        check_experts(pool);
        check_recurrent(pool);
        std::printf("%s: all kernels agree with their references\n", name.c_str());
    }
    check_attendance();
    check_changing_threads();
    std::puts("threads leave and come back");
    check_group();
    std::puts("devices in a group");
    check_rounds();
    std::puts("rounds of one call");
    return 0;
}
