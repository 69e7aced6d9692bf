#include <array>

#include <fsdp/held.h>

#include "bindings.h"

namespace fsdp::python {

namespace {

/// Of four numbers in which what is one run may be written in several ways.
Extent extent_of(const std::array<int64_t, 4>& numbers) {
  const auto [first, run, stride, count] = numbers;
  if (run == 0 || count == 0) {
    return {};
  }
  return count == 1 || run == stride ? Extent::one_run(first, run * count) : Extent{first, run, stride, count};
}

/// A piece of what others than libfsdp have cut.
HeldTensor held_piece(
    const std::pair<std::vector<int64_t>, std::vector<int64_t>>& sizes_and_strides,
    const std::array<int64_t, 4>& extent,
    const at::Tensor& local,
    bool first_replica) {
  return {
      .sizes = sizes_and_strides.first,
      .strides = sizes_and_strides.second,
      .extent = extent_of(extent),
      .local = local,
      .first_replica = first_replica};
}

} // namespace

void bind_held(py::module_& m) {
  py::class_<HeldTensor>(m, "HeldTensor")
      .def_readonly("sizes", &HeldTensor::sizes)
      .def_readonly("local", &HeldTensor::local);
  m.def("held_like", &like, py::arg("held"), py::arg("tensor"));
  m.def(
      "held_piece",
      &held_piece,
      py::arg("sizes_and_strides"),
      py::arg("extent"),
      py::arg("local"),
      py::arg("first_replica"));
}

} // namespace fsdp::python
