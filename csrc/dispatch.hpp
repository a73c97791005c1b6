// The same kernels for several instruction sets, and which of them this machine can run.
#pragma once
#include <string>
#include <vector>

#include "kernels.hpp"

namespace motley {

// Names of the sets that this machine can run, best first; the last one, "portable", always is there.
std::vector<std::string> instruction_sets();

// The kernels of one of them; "" is the best. Throws std::invalid_argument for what this machine cannot run.
const Kernels& kernels_for(const std::string& name);

}  // namespace motley
