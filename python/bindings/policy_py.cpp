#include <torch/version.h>

#include <fsdp/policy.h>

#include "bindings.h"

namespace fsdp::python {

namespace {

using Dtype = std::optional<c10::ScalarType>;

/// What this PyTorch means by no `reduce_dtype`.
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
constexpr Dtype kDefaultReduceDtype = kShardDtype;
#else
constexpr Dtype kDefaultReduceDtype = std::nullopt; // param_dtype
#endif

void set_reshard_after_forward(FullyShardOptions& options, const std::variant<py::none, bool, int>& value) {
  if (const auto* reshard = std::get_if<bool>(&value)) {
    options.reshard_after_forward = *reshard;
  } else if (const auto* ranks = std::get_if<int>(&value)) {
    options.reshard_after_forward = *ranks;
  }
}

/// Placements by tensor: what the user's function said.
void set_placements(
    FullyShardOptions& options,
    const std::vector<std::tuple<at::Tensor, int64_t, std::optional<Mesh>, std::shared_ptr<GatherExtension>>>&
        placements) {
  std::unordered_map<const c10::TensorImpl*, ShardPlacement> by_tensor;
  for (const auto& [tensor, dim, mesh, extension] : placements) {
    by_tensor[tensor.unsafeGetTensorImpl()] = {dim, mesh, extension};
  }
  options.shard_placement_fn = [by_tensor](
                                   const at::Tensor& tensor, const std::string&) -> std::optional<ShardPlacement> {
    const auto found = by_tensor.find(tensor.unsafeGetTensorImpl());
    return found == by_tensor.end() ? std::nullopt : std::optional(found->second);
  };
}

} // namespace

void bind_policy(py::module_& m) {
  py::class_<FullyShardOptions>(m, "FullyShardOptions")
      .def(
          py::init([](const Mesh& mesh, const std::variant<py::none, bool, int>& reshard_after_forward) {
            FullyShardOptions options;
            options.mesh = mesh;
            set_reshard_after_forward(options, reshard_after_forward);
            return options;
          }),
          py::arg("mesh"),
          py::arg("reshard_after_forward"))
      .def(
          "set_precision",
          [](FullyShardOptions& options, Dtype param_dtype, Dtype reduce_dtype, Dtype output_dtype, bool cast_inputs) {
            options.mp_policy = {
                param_dtype, reduce_dtype ? reduce_dtype : kDefaultReduceDtype, output_dtype, cast_inputs};
          })
      .def(
          "set_offload",
          [](FullyShardOptions& options, bool pin_memory) { options.offload_policy = CPUOffloadPolicy{pin_memory}; })
      .def_readwrite("sync_module_states", &FullyShardOptions::sync_module_states)
      .def_readwrite("ignored_params", &FullyShardOptions::ignored_params)
      .def("set_placements", &set_placements);
}

} // namespace fsdp::python
