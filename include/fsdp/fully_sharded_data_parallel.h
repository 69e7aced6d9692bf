#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/call.h>
#include <fsdp/export.h>
#include <fsdp/fully_shard.h>
#include <fsdp/mesh.h>
#include <fsdp/module_ref.h>
#include <fsdp/policy.h>
#include <fsdp/summon.h>
#include <fsdp/wrap.h>

namespace fsdp {

/// What is cut over the ranks, and what stays whole.
enum class ShardingStrategy {
  kFullShard, ///< parameters, gradients, optimizer states; parameters are whole only while they are used
  kShardGradOp, ///< as above, but parameters stay whole from forward to backward
  kNoShard, ///< nothing: every rank has all, and gradients are all-reduced
  kHybridShard, ///< kFullShard within groups of ranks, kNoShard across them
  kHybridShardZero2, ///< kShardGradOp within groups of ranks, kNoShard across them
};

/// When a unit is gathered for its backward.
enum class BackwardPrefetch {
  kBackwardPre, ///< while the one before it computes: most overlap
  kBackwardPost, ///< once the one before it has computed and is released: one unit whole less
};

struct CPUOffload {
  bool offload_params = false; ///< shards, gradients and the optimizer live in host memory
};

struct FSDP_API MixedPrecision {
  std::optional<c10::ScalarType> param_dtype = std::nullopt; ///< of whole parameters, hence of compute
  std::optional<c10::ScalarType> reduce_dtype = std::nullopt; ///< of gradient reduction; unset: param_dtype
  std::optional<c10::ScalarType> buffer_dtype = std::nullopt; ///< of buffers, from the first forward on
  bool keep_low_precision_grads = false; ///< shards' gradients keep the dtype in which they were reduced
  bool cast_forward_inputs = false; ///< inputs are cast to param_dtype; a unit's below the root too
  bool cast_root_forward_inputs = true; ///< the root's are
  /// They become units of their own in full precision, where an auto_wrap_policy is given.
  ModuleClasses module_classes_to_ignore = batch_norms();

  static ModuleClasses batch_norms();
};

/// The ranks that share: one group; or two, to shard over and to replicate over.
using FSDPProcessGroup =
    std::variant<std::monostate, std::shared_ptr<Group>, std::pair<std::shared_ptr<Group>, std::shared_ptr<Group>>>;

/// The arguments of PyTorch's class, in its order.
struct FSDPOptions {
  FSDPProcessGroup process_group = {}; ///< unset: all ranks of the job
  ShardingStrategy sharding_strategy = ShardingStrategy::kFullShard;
  CPUOffload cpu_offload = {};
  std::optional<AutoWrapPolicy> auto_wrap_policy = std::nullopt; ///< unset: the module is one unit
  std::optional<BackwardPrefetch> backward_prefetch = BackwardPrefetch::kBackwardPre; ///< unset: none ahead
  MixedPrecision mixed_precision = {};
  std::vector<ModuleRef> ignored_modules = {}; ///< neither they nor what is below them is sharded
  std::function<void(torch::nn::Module&)> param_init_fn = nullptr; ///< gives modules built on the meta device values
  std::optional<c10::Device> device_id = std::nullopt; ///< to which the module moves before it is sharded
  bool sync_module_states = false; ///< parameters and buffers get rank 0's values before
  bool forward_prefetch = false; ///< units are gathered ahead in forward whatever this says
  bool limit_all_gathers = true; ///< gathers in flight are bounded whatever this says
  bool use_orig_params = false; ///< parameters() are parts under the original names; else one flat parameter a unit
  std::vector<at::Tensor> ignored_states = {}; ///< parameters that are not sharded
  std::optional<Mesh> device_mesh = std::nullopt; ///< in place of process_group
};

/// Reduces a unit's whole flat gradient, padded to the same length for each rank, and leaves this rank's part of the
/// result in `output`. With kNoShard `output` is the gradient itself. Nothing is divided but by it.
using CommHook = std::function<void(const at::Tensor& gradient, at::Tensor& output)>;

/// What `FullyShardedDataParallel` made of a module: a value, which does not keep it alive. Not thread safe.
class FSDP_API FSDPInstance {
 public:
  struct Impl;
  explicit FSDPInstance(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  /// Whether no other is above it. Known from the first forward on, or when it is asked here.
  bool check_is_root() const;
  ShardingStrategy sharding_strategy() const;
  const FSDPOptions& options() const;
  /// The unit, with the finer controls of `fully_shard`: `reset_iter_state()`, `note_shard_writes()`, prefetching.
  FSDPModule unit() const;

  /// Gradients are scaled so that their norm, of all ranks, is at most `max_norm`: the norm before, in the gradients'
  /// dtype. Root only. Collective.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0) const;

  /// While it lives, backwards add up gradients and communicate nothing.
  class FSDP_API NoSync {
   public:
    explicit NoSync(std::shared_ptr<Impl> impl);
    NoSync(NoSync&&) noexcept = default;
    ~NoSync();

   private:
    std::shared_ptr<Impl> impl_;
  };
  /// Root only.
  [[nodiscard]] NoSync no_sync() const;

  /// Parameters whole, under their own names, while the result lives.
  [[nodiscard]] SummonedParams summon_full_params(const SummonOptions& options = {}) const;
  /// `function` for each module, children first, which sees whole parameters and may write them. Collective.
  void apply(const std::function<void(torch::nn::Module&)>& function) const;

  /// Gradients are reduced by `hook` from now on. Root only, once, and not with hybrid strategies.
  void register_comm_hook(CommHook hook) const;

  /// For `FullyShardedDataParallel`: one call of the module. The boundary casts its inputs.
  class FSDP_API Call {
   public:
    explicit Call(const FSDPInstance& instance);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

   private:
    std::shared_ptr<Impl> impl_;
  };

 private:
  /// An Error unless this is the root, and no step or guard is under way.
  std::vector<at::Tensor> parameters_between_steps(const char* operation) const;

  std::shared_ptr<Impl> impl_;
};

namespace detail {
FSDP_API FSDPInstance wrap_module(torch::nn::Module& module, const FSDPOptions& options);
}

/// A module that is sharded in units, each cut as one flat parameter: `module` itself, and those below that
/// `auto_wrap_policy` chooses. No module is replaced: it goes where a `Holder` goes, and `model->member` is what it
/// was. Call it, or its `forward`: through `->` nothing is cast. Collective.
template <typename Holder>
class FullyShardedDataParallel : public Holder, public FSDPInstance {
 public:
  explicit FullyShardedDataParallel(Holder module, const FSDPOptions& options = {})
      : Holder(std::move(module)), FSDPInstance(detail::wrap_module(*this->get(), options)) {}

  template <typename... Arguments>
  auto forward(Arguments&&... arguments) {
    const Call call(*this);
    return fsdp::call(static_cast<Holder&>(*this), std::forward<Arguments>(arguments)...);
  }
  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  Holder module() const {
    return *this;
  }
};

/// All instances of a module and of those below it, parents first; `root_only`: those that have no other above.
FSDP_API std::vector<FSDPInstance> fsdp_modules(ModuleRef module, bool root_only = false);

/// While it lives, `wrap(module)` makes units with these options.
class FSDP_API EnableWrap {
 public:
  explicit EnableWrap(FSDPOptions options);
  ~EnableWrap();
  EnableWrap(const EnableWrap&) = delete;
  EnableWrap& operator=(const EnableWrap&) = delete;
};
[[nodiscard]] inline EnableWrap enable_wrap(FSDPOptions options = {}) {
  return EnableWrap(std::move(options));
}

/// Makes the module a unit, with the options of the `enable_wrap` that is alive, changed by `change`; leaves it as it
/// is if there is none. The same module, for a place in the model above it.
template <typename Holder>
Holder wrap(Holder module, const WrapOverride& change = nullptr);

namespace detail {
FSDP_API void wrap_if_enabled(torch::nn::Module& module, const WrapOverride& change);
}

template <typename Holder>
Holder wrap(Holder module, const WrapOverride& change) {
  detail::wrap_if_enabled(detail::module_of(module), change);
  return module;
}

/// Ways to reduce gradients, for `register_comm_hook`. A group: the one that the units are cut, or replicated, over.
namespace comm_hooks {
/// The mean over the ranks: what happens without a hook, with kNoShard.
FSDP_API CommHook allreduce_hook(std::shared_ptr<Group> group);
/// The same where parameters are cut.
FSDP_API CommHook reduce_scatter_hook(std::shared_ptr<Group> group);
/// Gradients travel in half precision; with any strategy but the hybrid ones.
FSDP_API CommHook fp16_compress_hook(std::shared_ptr<Group> group);
FSDP_API CommHook bf16_compress_hook(std::shared_ptr<Group> group);
} // namespace comm_hooks

} // namespace fsdp
