#include <fsdp/saved_checkpoint.h>

#include "bindings.h"
#include "values.h"

namespace fsdp::python {

namespace {

/// {"state": {name: numbers}, "param_groups": [{"params": names, ...}]}
py::object optimizer_of(const SavedCheckpoint& checkpoint) {
  const auto numbers = checkpoint.optimizer();
  if (!numbers) {
    return py::none();
  }
  py::dict states;
  for (const auto& item : numbers->state) {
    states[py::str(item.key())] = to_python(item.value().scalars);
  }
  py::list groups;
  for (const auto& group : numbers->param_groups) {
    py::dict options = to_python(group.options);
    options["params"] = group.params;
    groups.append(options);
  }
  py::dict optimizer;
  optimizer["state"] = states;
  optimizer["param_groups"] = groups;
  return optimizer;
}

} // namespace

void bind_saved_checkpoint(py::module_& m) {
  py::class_<SavedCheckpoint>(
      m, "SavedCheckpoint", "A checkpoint to look into: its tensors are read one at a time, whole, and checked.")
      .def(
          py::init([](const py::object& folder) {
            const auto path = py::module_::import("os").attr("fspath")(folder).cast<std::string>();
            return std::make_unique<SavedCheckpoint>(path);
          }),
          py::arg("folder"))
      .def_property_readonly("path", &SavedCheckpoint::path)
      .def_property_readonly("step", &SavedCheckpoint::step)
      .def_property_readonly(
          "extra", [](const SavedCheckpoint& checkpoint) { return to_python(checkpoint.extra()); }, "without tensors")
      .def_property_readonly("tensors", &SavedCheckpoint::tensors, "by name, on the meta device")
      .def_property_readonly("optimizer", &optimizer_of, "its numbers and groups, as a state dict has them, or None")
      .def("read", &SavedCheckpoint::read, py::arg("name"), NoGil());
}

} // namespace fsdp::python
