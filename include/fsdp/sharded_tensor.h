#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>
#include <fsdp/mesh.h>
#include <fsdp/module_ref.h>

namespace torch::jit {
struct Module;
}

namespace fsdp {

/// How a tensor lies on one mesh dimension: cut along `shard_dim`, or the same everywhere.
struct Placement {
  std::optional<int64_t> shard_dim;
  bool is_replicate() const {
    return !shard_dim;
  }
};

/// What is known of a parameter beyond this rank's piece. A value.
struct FSDP_API ShardedTensor {
  at::Tensor local; ///< this rank's piece: the tensor that `parameters()` holds
  std::string name; ///< "blocks.3.fc.weight", relative to the root
  std::vector<int64_t> sizes; ///< of the whole
  std::vector<int64_t> strides;
  Mesh mesh;
  std::vector<Placement> placements; ///< one per mesh dimension

  c10::ScalarType dtype() const {
    return local.scalar_type();
  }
  int64_t numel() const;
  /// The whole tensor, in the shard's dtype, on every rank. Collective.
  at::Tensor full_tensor() const;
  /// This rank's piece of the gradient; undefined where the shard has none.
  at::Tensor grad() const;
  /// The whole gradient, zero where a rank has none; undefined if no rank has one. Collective.
  at::Tensor full_grad() const;
};

/// True for the shards that `fully_shard` registers.
FSDP_API bool is_sharded(const at::Tensor& tensor);
/// From a shard; an Error for any other tensor.
FSDP_API ShardedTensor sharded(const at::Tensor& shard);

/// The shards of all parameters, also where `module.parameters()` cannot give them (ParameterList, ParameterDict,
/// TorchScript).
FSDP_API std::vector<at::Tensor> parameters(ConstModuleRef module);
FSDP_API std::vector<at::Tensor> parameters(const torch::jit::Module& module);
FSDP_API std::vector<std::pair<std::string, at::Tensor>> named_parameters(ConstModuleRef module);
FSDP_API std::vector<std::pair<std::string, at::Tensor>> named_parameters(const torch::jit::Module& module);

} // namespace fsdp
