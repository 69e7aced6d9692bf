#include <fsdp/mesh.h>

#include "bindings.h"

namespace fsdp::python {

void bind_mesh(py::module_& m) {
  py::class_<Mesh>(m, "Mesh")
      .def(py::init(&Mesh::from_groups), py::arg("groups"), py::arg("names"), py::arg("device"))
      .def_property_readonly("ndim", &Mesh::ndim)
      .def_property_readonly("sizes", &Mesh::sizes)
      .def("group", &Mesh::group, py::arg("dim") = 0)
      .def("__eq__", [](const Mesh& a, const Mesh& b) { return a == b; })
      .def("__repr__", &Mesh::str);
}

} // namespace fsdp::python
