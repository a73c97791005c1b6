// The native core. It takes plain pointers and strides, never torch tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "cpu_features.hpp"

namespace nb = nanobind;

NB_MODULE(_core, m) {
    m.doc() = "Motley's native core";
    m.def("cpu_features", &motley::cpu_features, "Vector extensions this machine can run.");
}
