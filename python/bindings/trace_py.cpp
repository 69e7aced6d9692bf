#include <fsdp/trace.h>

#include "bindings.h"

namespace fsdp::python {

void bind_trace(py::module_& m) {
  py::class_<Trace>(m, "Trace").def(py::init<const std::string&>(), py::arg("file")).def("end", &Trace::end);
}

} // namespace fsdp::python
