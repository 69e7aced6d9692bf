#include <fsdp/error.h>

#include "bindings.h"

namespace fsdp::python {

void bind_error(py::module_& m) {
  auto& error = py::register_exception<Error>(m, "Error", PyExc_RuntimeError);
  py::register_exception<CommError>(m, "CommError", error);
}

} // namespace fsdp::python
