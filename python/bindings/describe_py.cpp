#include <fsdp/describe.h>
#include <fsdp/fully_shard.h>

#include "bindings.h"

namespace fsdp::python {

void bind_describe(py::module_& m) {
  py::class_<UnitDescription>(m, "UnitDescription")
      .def_readonly("name", &UnitDescription::name)
      .def_readonly("parameters", &UnitDescription::parameters)
      .def_readonly("numel", &UnitDescription::numel)
      .def_readonly("bytes_whole", &UnitDescription::bytes_whole)
      .def_readonly("bytes_shard", &UnitDescription::bytes_shard)
      .def_readonly("dtype", &UnitDescription::dtype)
      .def_readonly("mesh", &UnitDescription::mesh)
      .def_readonly("policy", &UnitDescription::policy);
  py::class_<Description>(m, "Description")
      .def_readonly("units", &Description::units)
      .def_readonly("bytes_shard", &Description::bytes_shard)
      .def_readonly("bytes_peak", &Description::bytes_peak)
      .def("__str__", &Description::str)
      .def("__repr__", &Description::str);
  m.def(
      "describe", [](const FSDPModule& unit) { return describe(unit); }, py::arg("unit"));
}

} // namespace fsdp::python
