#include <fsdp/mesh.h>

#include "bindings.h"

namespace fsdp::python {

void bind_mesh(py::module_& m) {
  py::class_<Mesh>(m, "Mesh")
      .def(py::init(&Mesh::from_groups), py::arg("groups"), py::arg("names"), py::arg("device"))
      .def_property_readonly("ndim", &Mesh::ndim)
      .def("group", &Mesh::group, py::arg("dim") = 0)
      .def("__repr__", &Mesh::str);
}

} // namespace fsdp::python
