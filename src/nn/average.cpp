#include <fsdp/average.h>

#include <ATen/ops/cat.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <torch/nn/module.h>

#include <fsdp/mesh.h>

#include "base/check.h"
#include "engine/internal_scope.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "engine/write_values.h"
#include "nn/registry.h"
#include "nn/slots.h"

namespace fsdp {

namespace {

/// What a module's ranks have in common, and what each has for itself.
struct Plain {
  std::optional<Mesh> mesh; // the first sharded module's
  std::vector<at::Tensor> plain;

  void add(const at::Tensor& tensor) {
    const bool has_values = tensor.defined() && !tensor.is_meta() && tensor.numel() > 0;
    if (has_values && (tensor.is_floating_point() || tensor.is_complex())) {
      plain.push_back(tensor);
    }
  }
};

Plain look_at(torch::nn::Module& module, const AverageOptions& options) {
  Plain found;
  const auto note_mesh = [&](const torch::nn::Module& each) {
    if (const auto unit = nn::registry::find(each)) {
      found.mesh = found.mesh ? found.mesh : unit->mesh();
      FSDP_CHECK(
          unit->summoned == 0,
          "[average_ignored_] was called while parameters are shown whole: call it after the guard of "
          "summon_full_params has ended");
    }
  };
  for (const auto& [path, each] : nn::modules_of(module)) {
    note_mesh(*each);
  }
  FSDP_CHECK(found.mesh, "[average_ignored_] nothing in this module is sharded: call fully_shard first");
  for (const auto& slot : nn::slots_of(module)) {
    if (slot.tensor.requires_grad() && engine::param_of(slot.tensor) == nullptr) {
      found.add(slot.tensor);
    }
  }
  for (const auto& buffer : options.buffers ? module.buffers() : std::vector<at::Tensor>()) {
    found.add(buffer);
  }
  return found;
}

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor.resolve_conj()) : tensor;
}

// In float64 what is, all else in float32.
void average(const std::vector<at::Tensor>& tensors, c10::ScalarType dtype, const Mesh& mesh) {
  std::vector<at::Tensor> mine, flat;
  for (const auto& tensor : tensors) {
    if ((c10::toRealValueType(tensor.scalar_type()) == c10::kDouble) == (dtype == c10::kDouble)) {
      mine.push_back(tensor);
      flat.push_back(as_real(tensor).flatten().to(mesh.device(), dtype));
    }
  }
  if (flat.empty()) {
    return;
  }
  const at::Tensor all = at::cat(flat);
  for (int dim = 0; dim < mesh.ndim(); ++dim) {
    Group& group = *mesh.group(dim);
    group.all_reduce(all, ReduceOp::kSum, /*divide_by=*/group.size(), {"average_ignored_", ""})->wait();
  }
  int64_t offset = 0;
  for (const auto& tensor : mine) {
    const int64_t numel = tensor.numel() * (tensor.is_complex() ? 2 : 1);
    const at::Tensor values = all.narrow(0, offset, numel);
    const at::Tensor numbers = tensor.is_complex() ? at::view_as_complex(values.clone().view({-1, 2})) : values;
    engine::write_values(tensor, numbers.view(tensor.sizes()));
    offset += numel;
  }
}

} // namespace

void average_ignored_(ModuleRef given, const AverageOptions& options) {
  torch::nn::Module& module = given.for_operation("average_ignored_");
  const engine::InternalScope scope;
  const Plain found = look_at(module, options);
  for (const auto dtype : {c10::kFloat, c10::kDouble}) {
    average(found.plain, dtype, *found.mesh);
  }
}

} // namespace fsdp
