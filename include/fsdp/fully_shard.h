#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <fsdp/export.h>
#include <fsdp/module_ref.h>
#include <fsdp/policy.h>

namespace torch::jit {
struct Module;
}

namespace fsdp {

namespace engine {
class Unit;
}

/// Waits for an asynchronous `unshard`.
class FSDP_API UnshardHandle {
 public:
  UnshardHandle() = default;
  explicit UnshardHandle(std::weak_ptr<engine::Unit> unit) : unit_(std::move(unit)) {}
  /// Returns once the parameters may be used. Calling it is never necessary: a touch waits by itself.
  void wait();

 private:
  std::weak_ptr<engine::Unit> unit_;
};

/// Gathers the flat, equally long inputs of all ranks into `output`, rank after rank.
using AllGatherFn = std::function<void(at::Tensor& output, const at::Tensor& input, Group& group)>;
/// Sums the ranks' flat inputs and leaves this rank's part of the sum in `output`.
using ReduceScatterFn = std::function<void(at::Tensor& output, const at::Tensor& input, Group& group)>;

/// What `fully_shard` made of a module: a value, found again by `as_fsdp`. Does not keep the module alive.
/// `recurse` means: also the sharded modules below. Not thread safe.
class FSDP_API FSDPModule {
 public:
  explicit FSDPModule(std::shared_ptr<engine::Unit> unit);

  /// Makes the parameters whole until `reshard`, or until a backward is over: what reads them in a forward may be one
  /// rank that looks at them. (Where gathers ask nobody, until they were used.) Not recursive.
  UnshardHandle unshard(bool async_op = false);
  /// Frees the whole parameters, unless a guard of `summon_full_params` shows them. Not recursive.
  void reshard();
  /// Call it before shards are written by what no operator shows (a kernel of another library, numpy, an address). Not
  /// needed between the end of a backward and the next step, where optimizers write. For the whole model. Collective.
  void note_shard_writes();
  /// After an exception in the middle of a forward or backward: forgets the broken step. Call it on the root.
  void reset_iter_state();

  /// false: the next backward leaves reductions running, for a later backward to wait for.
  void set_is_last_backward(bool is_last_backward);
  /// false: gradients accumulate unsharded, without communication.
  void set_requires_gradient_sync(bool requires_gradient_sync, bool recurse = true);
  /// false: hybrid meshes reduce-scatter, and put the all-reduce off.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);
  void set_reshard_after_forward(bool reshard_after_forward, bool recurse = true);
  void set_reshard_after_backward(bool reshard_after_backward, bool recurse = true);
  /// Units to gather when this one is touched in forward, instead of those that the schedule expects.
  void set_modules_to_forward_prefetch(const std::vector<FSDPModule>& modules);
  void set_modules_to_backward_prefetch(const std::vector<FSDPModule>& modules);
  void set_custom_all_gather(AllGatherFn all_gather);
  void set_custom_reduce_scatter(ReduceScatterFn reduce_scatter);
  /// Called once for each reduction (a unit's parameters of one reduce dtype on one mesh), before the parameters get
  /// their gradients: with this rank's part of all of them in one flat tensor, to be changed in place. Every parameter
  /// takes as much of it as the first rank's shard has; what a smaller shard leaves is zero.
  void set_all_reduce_hook(std::function<void(at::Tensor&)> hook, std::optional<c10::Stream> stream = std::nullopt);
  /// The next gathers wait for this event instead of for all work on the current stream. Root only.
  void set_post_optim_event(std::shared_ptr<c10::Event> event);
  /// Gradients are divided by `factor` instead of by the number of ranks. Not recursive.
  void set_gradient_divide_factor(std::optional<double> factor);
  void set_reduce_scatter_divide_factor(std::optional<double> factor) {
    set_gradient_divide_factor(factor);
  }
  /// Reductions only ever sum (libfsdp's always do); scaling is separate.
  void set_force_sum_reduction_for_comms(bool enable);
  /// true: trainable parameters without a gradient take part in the reduction as zeros.
  void set_reduce_scatter_unused_params(bool enable, bool recurse = true);
  /// How many units' gradients may be in flight at once, below one root; of what its units say, the most holds.
  void set_reduce_scatter_max_input_buffers(int64_t max_input_buffers, bool recurse = true);
  /// Reductions use a communicator of their own, so that they do not queue behind gathers.
  void set_separate_reduce_scatter_group(bool enable = true, bool recurse = true);
  /// false: backward does not prefetch this unit (an embedding's backward needs no weight).
  void set_unshard_in_backward(bool unshard_in_backward);
  /// Buffers for collectives come from the process group's backend, if it has memory of its own (NCCL), for all units
  /// that share the group.
  void set_allocate_memory_from_process_group_for_comm(bool enable);

  /// "blocks.3", relative to the root; "" for a root.
  const std::string& name() const;
  const std::shared_ptr<engine::Unit>& unit() const {
    return unit_;
  }

 private:
  std::shared_ptr<engine::Unit> unit_;
};

/// Shards a module's parameters over the ranks of a mesh, those excepted that a submodule's unit already holds: call it
/// on the submodules first. From then on `module.parameters()` are this rank's shards, with the gradients; the module's
/// own members (`linear->weight`) stay whole to whoever reads them. Collective.
FSDP_API FSDPModule fully_shard(ModuleRef module, const FullyShardOptions& options = {});
/// Several modules as one unit.
FSDP_API FSDPModule fully_shard(std::initializer_list<ModuleRef> modules, const FullyShardOptions& options = {});
FSDP_API FSDPModule fully_shard(const std::vector<torch::nn::Module*>& modules, const FullyShardOptions& options = {});
/// A TorchScript module. Its shards: `fsdp::parameters(module)`.
FSDP_API FSDPModule fully_shard(torch::jit::Module& module, const FullyShardOptions& options = {});

/// Gives memory to a sharded model that was built on the meta device: this rank's pieces of parameters, and all of its
/// buffers, on the mesh's device unless another is given. Give them values next (`reset_parameters()`,
/// `torch::nn::init` on members): the same on all ranks. Collective.
FSDP_API void to_empty(ModuleRef module, std::optional<c10::Device> device = std::nullopt);

/// What an earlier `fully_shard` made of this module; an Error if nothing.
FSDP_API FSDPModule as_fsdp(ModuleRef module);
FSDP_API bool is_fsdp(ConstModuleRef module);

/// The units below several roots share streams, the bound on memory and the limit of reductions in flight.
FSDP_API void share_comm_ctx(const std::vector<FSDPModule>& modules);

} // namespace fsdp
