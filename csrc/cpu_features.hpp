#pragma once
#include <string>
#include <vector>

namespace motley {

// Names of the vector extensions this machine can run, e.g. {"avx2", "avx512f"}; empty on other processors.
std::vector<std::string> cpu_features();

}  // namespace motley
