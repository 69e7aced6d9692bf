#include <fsdp/fully_shard.h>

#include <torch/csrc/Event.h>

#include "bindings.h"

namespace fsdp::python {

namespace {

template <typename Function>
Function with_gil(const py::function& function) {
  return [held = Held(function)](at::Tensor& output, const at::Tensor& input, Group&) {
    py::gil_scoped_acquire gil;
    held.get()(output, input);
  };
}

void set_all_reduce_hook(FSDPModule& module, const py::object& hook, std::optional<c10::Stream> stream) {
  if (hook.is_none()) {
    module.set_all_reduce_hook(nullptr);
    return;
  }
  module.set_all_reduce_hook(
      [held = Held(hook)](at::Tensor& tensor) {
        py::gil_scoped_acquire gil;
        held.get()(tensor);
      },
      stream);
}

void set_post_optim_event(FSDPModule& module, const py::object& event) {
  if (!THPEvent_Check(event.ptr())) {
    throw py::type_error("[set_post_optim_event] expected a torch.Event, got " + py::repr(event).cast<std::string>());
  }
  // Its object keeps the event, and lives until the gathers have waited for it.
  auto held = std::make_shared<Held>(event);
  auto* inner = &reinterpret_cast<THPEvent*>(event.ptr())->event;
  module.set_post_optim_event(std::shared_ptr<c10::Event>(held, inner));
}

} // namespace

void bind_fully_shard(py::module_& m) {
  py::class_<UnshardHandle>(m, "UnshardHandle").def("wait", &UnshardHandle::wait, NoGil());
  py::class_<FSDPModule>(m, "Unit")
      .def_property_readonly("name", &FSDPModule::name)
      .def("unshard", &FSDPModule::unshard, py::arg("async_op"), NoGil())
      .def("reshard", &FSDPModule::reshard, NoGil())
      .def("note_shard_writes", &FSDPModule::note_shard_writes, NoGil())
      .def("reset_iter_state", &FSDPModule::reset_iter_state, NoGil())
      .def("set_is_last_backward", &FSDPModule::set_is_last_backward)
      .def("set_requires_gradient_sync", &FSDPModule::set_requires_gradient_sync)
      .def("set_requires_all_reduce", &FSDPModule::set_requires_all_reduce)
      .def("set_reshard_after_forward", &FSDPModule::set_reshard_after_forward)
      .def("set_reshard_after_backward", &FSDPModule::set_reshard_after_backward)
      .def("set_modules_to_forward_prefetch", &FSDPModule::set_modules_to_forward_prefetch)
      .def("set_modules_to_backward_prefetch", &FSDPModule::set_modules_to_backward_prefetch)
      .def(
          "set_custom_all_gather",
          [](FSDPModule& module, const py::function& function) {
            auto all_gather = with_gil<AllGatherFn>(function);
            py::gil_scoped_release no_gil;
            module.set_custom_all_gather(std::move(all_gather));
          })
      .def(
          "set_custom_reduce_scatter",
          [](FSDPModule& module, const py::function& function) {
            module.set_custom_reduce_scatter(with_gil<ReduceScatterFn>(function));
          })
      .def("set_all_reduce_hook", &set_all_reduce_hook)
      .def("set_post_optim_event", &set_post_optim_event)
      .def("set_gradient_divide_factor", &FSDPModule::set_gradient_divide_factor)
      .def("set_force_sum_reduction_for_comms", &FSDPModule::set_force_sum_reduction_for_comms)
      .def("set_reduce_scatter_unused_params", &FSDPModule::set_reduce_scatter_unused_params)
      .def("set_reduce_scatter_max_input_buffers", &FSDPModule::set_reduce_scatter_max_input_buffers)
      .def("set_separate_reduce_scatter_group", &FSDPModule::set_separate_reduce_scatter_group, NoGil())
      .def("set_unshard_in_backward", &FSDPModule::set_unshard_in_backward)
      .def(
          "set_allocate_memory_from_process_group_for_comm",
          &FSDPModule::set_allocate_memory_from_process_group_for_comm);
  m.def("share_comm_ctx", &share_comm_ctx, NoGil());
}

} // namespace fsdp::python
