// A function of Python's that reduces a unit's gradients, as PyTorch's FullyShardedDataParallel calls it.

#include <ATen/core/Tensor.h>

#include <fsdp/front_end.h>

#include "bindings.h"

namespace fsdp::python {

namespace {

/// The function may put other data behind what it is given: of another dtype, say.
at::Tensor for_python(const at::Tensor& tensor) {
  return tensor.detach();
}

void take_result(const at::Tensor& given, at::Tensor& output) {
  if (!given.is_alias_of(output)) {
    output.copy_(given);
  }
}

void reduce(const Held& hook, const at::Tensor& gradient, at::Tensor& output) {
  const bool sharded = !output.is_same(gradient);
  const at::Tensor whole = for_python(gradient), part = sharded ? for_python(output) : whole;
  {
    py::gil_scoped_acquire gil;
    sharded ? hook.get()(whole, part) : hook.get()(whole);
  }
  take_result(part, output);
}

} // namespace

void bind_comm_hook(py::module_& m) {
  m.def(
      "set_comm_hook",
      [](const FSDPModule& unit, const py::function& hook, bool sharded) {
        const auto call = [held = Held(hook)](const at::Tensor& gradient, at::Tensor& output) {
          reduce(held, gradient, output);
        };
        py::gil_scoped_release no_gil;
        set_comm_hook(unit, call, sharded);
      },
      py::arg("unit"),
      py::arg("hook"),
      py::arg("sharded"));
  m.def("reduce_as_computed", &reduce_as_computed, py::arg("unit"));
  m.def("show_waiting_gradients", &show_waiting_gradients, py::arg("unit"));
  m.def("set_keep_gradient_dtype", &set_keep_gradient_dtype, py::arg("unit"), py::arg("keep"));
}

} // namespace fsdp::python
