#include <memory>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <fsdp/group.h>

#include "bindings.h"

namespace fsdp::python {

namespace {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

std::shared_ptr<Group> group_of(const ProcessGroup& process_group, c10::Device device, bool shared_memory) {
  py::gil_scoped_release no_gil;
  return shared_memory ? Group::nearest(process_group, device) : Group::from(process_group);
}

} // namespace

void bind_group(py::module_& m) {
  py::class_<Group, std::shared_ptr<Group>>(m, "Group")
      .def_property_readonly("rank", &Group::rank)
      .def_property_readonly("size", &Group::size)
      .def_property_readonly("name", &Group::name);
  m.def("group_of_one", &group_of_one);
  m.def("group_of", &group_of, py::arg("process_group"), py::arg("device"), py::arg("shared_memory"));
}

} // namespace fsdp::python
