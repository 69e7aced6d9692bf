#include <map>
#include <tuple>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <fsdp/group.h>

#include "bindings.h"

namespace fsdp::python {

namespace {

using ProcessGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

// One group for each process group and kind of device, as long as anybody uses it: meshes are equal if their groups are
// the same.
std::shared_ptr<Group> group_of(const ProcessGroup& process_group, c10::Device device, bool shared_memory) {
  struct Entry {
    c10::weak_intrusive_ptr<c10d::ProcessGroup> process_group; // so that its address means this one
    std::weak_ptr<Group> group;
  };
  static auto* groups = new std::map<std::tuple<c10d::ProcessGroup*, c10::DeviceType, bool>, Entry>();
  std::erase_if(*groups, [](const auto& item) { return item.second.group.expired(); });
  const std::tuple key{process_group.get(), device.type(), shared_memory};
  if (auto found = groups->find(key); found != groups->end()) {
    if (auto group = found->second.group.lock()) {
      return group;
    }
  }
  std::shared_ptr<Group> group;
  {
    py::gil_scoped_release no_gil;
    group = shared_memory ? Group::nearest(process_group, device) : Group::from(process_group);
  }
  groups->insert_or_assign(key, Entry{c10::weak_intrusive_ptr<c10d::ProcessGroup>(process_group), group});
  return group;
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
