// The same calls by nanobind: functions of 1 to 58 float32 vectors on the CPU, which do nothing.
//
// One function for each number, as nanobind's have a fixed one. It is compiled by floor.py together with nanobind's own sources.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <utility>

namespace nb = nanobind;

using Vector = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <std::size_t> using VectorAt = const Vector &;

template <std::size_t... I> static void define(nb::module_ &m, const char *name, std::index_sequence<I...>)
{
    m.def(name, [](VectorAt<I>...) {});
}

NB_MODULE(_fastexchange_nanobind, m)
{
    m.def("take_0", [] {});
    define(m, "take_1", std::make_index_sequence<1>());
    define(m, "take_3", std::make_index_sequence<3>());
    define(m, "take_16", std::make_index_sequence<16>());
    define(m, "take_32", std::make_index_sequence<32>());
    define(m, "take_58", std::make_index_sequence<58>());
}
