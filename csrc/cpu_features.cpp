#include "cpu_features.hpp"

namespace motley {

std::vector<std::string> cpu_features() {
    std::vector<std::string> found;
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
#define MOTLEY_FEATURE(name) \
    if (__builtin_cpu_supports(name)) found.emplace_back(name)
    MOTLEY_FEATURE("avx2");
    MOTLEY_FEATURE("fma");
    MOTLEY_FEATURE("avx512f");
    MOTLEY_FEATURE("avx512bw");
    MOTLEY_FEATURE("avx512vl");
    MOTLEY_FEATURE("avx512vnni");
#undef MOTLEY_FEATURE
#endif
    return found;
}

}  // namespace motley
