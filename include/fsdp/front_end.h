#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/cut.h>
#include <fsdp/export.h>
#include <fsdp/fully_shard.h>
#include <fsdp/shown_shard.h>
#include <fsdp/summon.h>

namespace fsdp::engine {
class Runtime;
}

/// What other kinds of modules than torch::nn's need to be sharded: the Python package is built on this.
namespace fsdp {

/// A place in which a module holds a parameter.
struct Slot {
  std::string path; ///< "blocks.3.fc.weight"
  at::Tensor tensor; ///< the parameter; or, where an earlier call has sharded it, its handle or its shard
  /// Puts another tensor there; null where the handle has to stay.
  std::function<void(const at::Tensor&)> replace;
};

/// A module as sharding sees it.
struct ModuleView {
  std::string name; ///< for errors
  std::vector<Slot> slots; ///< its own and those of all modules below, in an order that all ranks share
  std::vector<std::pair<std::string, FSDPModule>> below; ///< sharded modules below, by their path
  std::vector<at::Tensor> buffers;
};

/// One unit of several modules. Parameters may be on the meta device, if users are shown something else than the shards
/// (`show_as`) through which real ones come.
/// With `flat` they are cut as one flat parameter.
FSDP_API FSDPModule fully_shard(
    const std::vector<ModuleView>& modules,
    const FullyShardOptions& options,
    const std::optional<FlatCut>& flat = std::nullopt);

/// Of a unit whose parameters are shown as one: the tensor that has this rank's share of all of them. Undefined for any
/// other unit, and for one without parameters.
FSDP_API at::Tensor flat_shard_of(const FSDPModule& module);
/// Users have put another tensor in its place: that is it from now on.
FSDP_API void set_flat_shard(const FSDPModule& module, const at::Tensor& tensor);
/// This rank's piece of the parameter behind a handle: a part of the flat shard, if there is one.
FSDP_API at::Tensor shard_behind(const at::Tensor& handle);
/// The flat shard as far as it shows this parameter; null if there is none.
FSDP_API std::shared_ptr<ShownShard> shown_in_flat(const at::Tensor& handle);

/// True for handles and shards, and for views of them.
FSDP_API bool belongs_to_unit(const at::Tensor& tensor);
/// False once `set_data` has put other data into what was a handle.
FSDP_API bool is_intact_handle(const at::Tensor& tensor);
/// Makes a handle of this module's again of one that was given other data; what these are becomes its value. Nothing
/// for any other tensor. Collective.
FSDP_API void restore_handle(const FSDPModule& module, const at::Tensor& handle);
/// The module whose call of `fully_shard` took the parameter behind a shard or a handle.
FSDP_API FSDPModule module_of(const at::Tensor& shard);
/// Whether no other unit is above it.
FSDP_API bool is_root(const FSDPModule& module);
/// An error while parameters of the module have no values yet.
FSDP_API void check_materialized(const FSDPModule& module);
/// From now on its parameters are gathered in this dtype, and inputs cast to it; unset: in their own. A
/// backward through what was recorded before is an error. Collective where that changes.
FSDP_API void compute_in(const FSDPModule& module, std::optional<c10::ScalarType> param_dtype);
/// The handle of a shard; made anew if nobody holds it.
FSDP_API at::Tensor handle_of(const at::Tensor& shard);
/// `requires_grad` was set on the handle or on what users are shown of the shard: the other follows.
FSDP_API void follow_requires_grad(const at::Tensor& tensor);
/// The wholes, on `device` of every rank, of what is cut as parameters are: each tensor comes with the parameter's
/// shard or handle, and stands for the parameter's own values where it is unset. Those of one unit that follow one
/// another travel together. Collective.
FSDP_API std::vector<at::Tensor> full_tensors(
    const std::vector<std::pair<at::Tensor, std::optional<at::Tensor>>>& pieces, c10::Device device);
/// This rank's piece of a whole parameter, as a tensor of its own.
FSDP_API at::Tensor piece_of(const at::Tensor& shard, const at::Tensor& whole);
/// From now on users are shown `shown` in place of the shard.
FSDP_API void show_as(const at::Tensor& shard, std::shared_ptr<ShownShard> shown);
/// The same where it is a tensor that has the shard's memory (`set_data`): its `replacement` is the shard itself now.
FSDP_API void show_in_place(const at::Tensor& shard, std::shared_ptr<ShownShard> shown);

/// What the program's language wants. Once, before all else.
/// A lock that the program may hold when it calls the library (Python's GIL): `let_go` gives it up if this thread holds
/// it, and returns null if not; `take_back` is given what `let_go` returned. Around all waiting.
/// `raise` throws an Error found in the middle of an operator in a form that torch hands on to the program as it is.
/// `interruption`: what the program's user has asked for on this thread meanwhile (KeyboardInterrupt), or null. Asked
/// in long waits, which then end with it. `raise_later` raises that as soon as the program goes on, and nothing else:
/// it is called with what a wait at the end of a group has thrown.
FSDP_API void set_caller(
    void* (*let_go)(),
    void (*take_back)(void* token),
    void (*raise)(std::exception_ptr error),
    std::exception_ptr (*interruption)(),
    void (*raise_later)(std::exception_ptr error));

/// Every call of a sharded module is going to be a ModuleCall: graphs on its parameters that are made outside of all
/// calls are no forwards, and do not keep parameters from being written.
FSDP_API void expect_calls(const FSDPModule& module);

/// While it lives, a module is being called. Functions of users may ask a handle whether it requires a gradient before
/// any operator on it is seen: from its construction on, what is below a root says what its shards say.
class FSDP_API ModuleCall {
 public:
  explicit ModuleCall(const FSDPModule& module);
  ~ModuleCall();
  ModuleCall(const ModuleCall&) = delete;
  ModuleCall& operator=(const ModuleCall&) = delete;

 private:
  std::shared_ptr<engine::Runtime> root_; // if the module is one
};

/// Outside of calls and backwards: whether no backward has followed the last forward.
FSDP_API bool has_open_forward(const FSDPModule& module);

/// A flat unit's gradients are reduced by `hook` from now on, and not divided: it is given the whole flat gradient,
/// padded to the same length for each rank, and leaves this rank's part of the result in the second tensor. Not
/// `sharded` (the unit's mesh shards over one rank): both are the gradient.
FSDP_API void set_comm_hook(
    const FSDPModule& module, const std::function<void(const at::Tensor&, at::Tensor&)>& hook, bool sharded);
/// Gradients are reduced in the dtype that backward makes them in: where a hook gives them another one by itself.
FSDP_API void reduce_as_computed(const FSDPModule& module);
/// Gradients that no backward has reduced yet are seen in the places of the shards', whole, and dropped with these.
FSDP_API void show_waiting_gradients(const FSDPModule& module);
/// Gradients of a unit's shards keep the dtype in which they were reduced.
FSDP_API void set_keep_gradient_dtype(const FSDPModule& module, bool keep);

/// Gives a unit the settings of another, as FSDPModule's setters made them; lists of modules to prefetch excepted.
FSDP_API void copy_settings(const FSDPModule& from, const FSDPModule& to);

/// Error if guards that are there already show parameters of these modules in a way that does not go with the options.
FSDP_API void check_may_summon(const std::vector<FSDPModule>& modules, const SummonOptions& options);
/// By a guard, on this rank or another.
FSDP_API bool is_summoned(const FSDPModule& module);

/// As `summon_full_params(module)`, for the units of these slots; `only`, if it is not null, for that unit alone.
[[nodiscard]] FSDP_API SummonedParams
summon_full_params(const std::vector<Slot>& slots, const FSDPModule* only, const SummonOptions& options);

} // namespace fsdp
