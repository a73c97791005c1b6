#include "dispatch.hpp"

#include <stdexcept>
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace motley {

// clang-format off
namespace portable { extern const Kernels table; }
namespace neon_dotprod { extern const Kernels table; }
namespace neon_i8mm { extern const Kernels table; }
namespace avx2 { extern const Kernels table; }
namespace avx_vnni { extern const Kernels table; }
namespace vnni_256 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
namespace avx512_vnni { extern const Kernels table; }
// clang-format on

namespace {

#if defined(MOTLEY_HAS_avx_vnni)
// Compilers before GCC 13 do not know this feature's name in __builtin_cpu_supports.
bool has_avx_vnni() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

#if defined(__aarch64__)
#if defined(__linux__)
[[maybe_unused]] bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }   // HWCAP_ASIMDDP
[[maybe_unused]] bool has_i8mm() { return getauxval(AT_HWCAP2) >> 13 & 1; }  // HWCAP2_I8MM
#else
[[maybe_unused]] bool has_dotprod() { return false; }
[[maybe_unused]] bool has_i8mm() { return false; }
#endif
#endif

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
#if defined(MOTLEY_HAS_avx_vnni)
    if (has_avx2 && has_avx_vnni()) found.push_back(&avx_vnni::table);
#endif
#if defined(MOTLEY_HAS_vnni_256)
    if (has_avx512 && __builtin_cpu_supports("avx512vnni")) found.push_back(&vnni_256::table);
#endif
#if defined(MOTLEY_HAS_avx2)
    if (has_avx2) found.push_back(&avx2::table);
#endif
#if defined(MOTLEY_HAS_neon_i8mm)
    if (has_dotprod() && has_i8mm()) found.push_back(&neon_i8mm::table);
#endif
#if defined(MOTLEY_HAS_neon_dotprod)
    if (has_dotprod()) found.push_back(&neon_dotprod::table);
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
