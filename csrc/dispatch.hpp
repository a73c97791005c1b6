// The same kernels for several instruction sets, and the sets that this machine supports.
#pragma once
#include <string>
#include <vector>

#include "kernels.hpp"

namespace motley {

// Names of the sets that this machine supports, best first; the last one is always "portable".
std::vector<std::string> instruction_sets();

// The kernels of one set; "": the best one. Throws std::invalid_argument for a set that is not supported here.
const Kernels& kernels_for(const std::string& name);

}  // namespace motley
