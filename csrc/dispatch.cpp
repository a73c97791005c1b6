#include "dispatch.hpp"

#include <stdexcept>

namespace motley {

// clang-format off
namespace portable { extern const Kernels table; }
namespace avx2 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
namespace avx512_vnni { extern const Kernels table; }
// clang-format on

namespace {

std::vector<const Kernels*> usable() {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    [[maybe_unused]] const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    [[maybe_unused]] const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                                             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
#if defined(MOTLEY_HAS_avx512_vnni)
    if (has_avx512 && __builtin_cpu_supports("avx512vnni")) found.push_back(&avx512_vnni::table);
#endif
#if defined(MOTLEY_HAS_avx512)
    if (has_avx512) found.push_back(&avx512::table);
#endif
#if defined(MOTLEY_HAS_avx2)
    if (has_avx2) found.push_back(&avx2::table);
#endif
    found.push_back(&portable::table);
    return found;
}

}  // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Kernels* kernels : usable()) names.emplace_back(kernels->name);
    return names;
}

const Kernels& kernels_for(const std::string& name) {
    for (const Kernels* kernels : usable())
        if (name.empty() || name == kernels->name) return *kernels;
    throw std::invalid_argument("this machine cannot run the instruction set " + name);
}

}  // namespace motley
