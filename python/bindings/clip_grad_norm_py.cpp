#include <fsdp/clip_grad_norm.h>

#include "bindings.h"

namespace fsdp::python {

void bind_clip_grad_norm(py::module_& m) {
  m.def(
      "clip_grad_norm_",
      [](const std::vector<at::Tensor>& parameters, double max_norm, double norm_type, bool error_if_nonfinite) {
        return clip_grad_norm_(parameters, max_norm, ClipOptions{norm_type, error_if_nonfinite});
      },
      py::arg("parameters"),
      py::arg("max_norm"),
      py::arg("norm_type"),
      py::arg("error_if_nonfinite"),
      NoGil());
}

} // namespace fsdp::python
