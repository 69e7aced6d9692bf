#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/cut.h>
#include <fsdp/mesh.h>
#include <fsdp/policy.h>

#include "base/stream.h"
#include "engine/bucket.h"
#include "engine/param.h"
#include "engine/schedule.h"
#include "engine/tenant.h"

namespace fsdp::engine {

class BackwardGraph;
class Runtime;

/// Which memory of a unit lives, besides its shards. Gradients on their way are the reducer's, whatever the state here.
enum class UnitState : char {
  kSharded, ///< none
  kArriving, ///< the whole parameters, being filled
  kWhole, ///< the whole parameters, under the handles
};

/// For whose next touch a unit was gathered ahead of it.
enum class GatheredFor : char { kNobody, kForward, kBackward, kEvaluation, kWhoeverComes };

/// When a unit was used last: whoever asks for its release may have used it till now.
enum class Left : char { kUnknown, kForAnother, kForItsBackward };

struct ParamSpec {
  std::string name; ///< relative to the unit's module
  at::Tensor tensor; ///< becomes the handle
  ShardPlacement placement;
};

struct UnitSpec {
  std::string name;
  std::vector<ParamSpec> params;
  Mesh mesh;
  c10::Device device;
  MixedPrecisionPolicy precision;
  std::optional<CPUOffloadPolicy> offload;
  ReshardAfterForward reshard_after_forward;
  /// If set, the parameters are cut as one flat parameter.
  std::optional<FlatCut> flat = std::nullopt;
};

/// When a unit's use in backward lets the next one be gathered.
enum class NextInBackward : char { kNever, kWhenUsed, kWhenDone };

/// What a unit does when; set by the user, read by runtime and reducer.
struct UnitPolicy {
  std::optional<bool> reshard_after_forward; ///< unset: unless it is a root
  std::optional<int> reshard_to; ///< after forward, among this many ranks
  bool reshard_after_backward = true;
  bool requires_gradient_sync = true;
  bool requires_all_reduce = true;
  bool reduce_unused_params = false;
  bool casts_inputs_as_root = false; ///< at its boundary, whatever its precision says of inputs elsewhere
  bool shows_waiting_gradients = false; ///< those that no backward has reduced yet: whole, in place of the shards'
  bool keep_gradient_dtype = false; ///< shards get gradients in the dtype in which they were reduced
  bool prefetch_in_backward = true;
  NextInBackward next_in_backward = NextInBackward::kWhenUsed;
  std::optional<int64_t> max_reductions; ///< in flight; of the units of one runtime, the most holds
  std::optional<double> divide_factor;
  std::vector<std::weak_ptr<Unit>> forward_prefetch;
  std::vector<std::weak_ptr<Unit>> backward_prefetch;
  std::function<void(at::Tensor&)> all_reduce; ///< across replicas, by the user and with all that belongs to it
  std::function<void(at::Tensor&)> all_reduce_hook;
  std::optional<c10::Stream> all_reduce_hook_stream;
};

/// A collective that a user brings: output, input, group.
using CollectiveFn = std::function<void(at::Tensor&, const at::Tensor&, Group&)>;

/// Parameters that are unsharded, resharded and reduced together. Kept alive by the handles' storages.
/// The state changes in `unshard`, `wait`, `reshard` and nowhere else. Not thread safe by itself: the runtime's lock
/// covers it.
class Unit : public std::enable_shared_from_this<Unit> {
 public:
  /// Collective: the ranks must give the same parameters in the same order.
  static std::shared_ptr<Unit> create(UnitSpec spec);
  ~Unit();

  const std::string& name() const {
    return spec_.name;
  }
  /// For people: "(root)" where the name is empty.
  const std::string& display_name() const {
    return display_name_;
  }
  void set_name(std::string name);
  c10::Device device() const {
    return spec_.device;
  }
  const Mesh& mesh() const {
    return spec_.mesh;
  }
  const MixedPrecisionPolicy& precision() const {
    return spec_.precision;
  }
  const std::optional<CPUOffloadPolicy>& offload_policy() const {
    return spec_.offload;
  }
  const std::optional<FlatCut>& flat() const {
    return spec_.flat;
  }
  bool offloaded() const {
    return spec_.offload.has_value();
  }
  const std::vector<std::unique_ptr<Param>>& params() const {
    return params_;
  }
  const std::vector<std::unique_ptr<Bucket>>& buckets() const {
    return buckets_;
  }
  UnitPolicy policy;
  /// What the interface that made it keeps of it; goes with it.
  struct Companion {
    virtual ~Companion() = default;
  };
  std::shared_ptr<Companion> companion;
  /// Methods whose calls go through the module's boundary, as those of `forward` do.
  std::set<std::string> forward_methods;
  /// Parameters that its modules have and that were to be left alone: no other tensor comes to lie where they were.
  std::unordered_map<const c10::TensorImpl*, WeakTensor> ignored;
  /// By what goes with it, as no handle does.
  bool kept = false;

  // -- its place among the units

  Runtime& runtime() const {
    return *runtime_;
  }
  const std::shared_ptr<Runtime>& shared_runtime() const {
    return runtime_;
  }
  /// `number`: within the runtime, the same on all ranks.
  void join(std::shared_ptr<Runtime> runtime, int number);
  int number() const {
    return number_;
  }
  Unit* parent() const {
    return parent_;
  }
  void set_parent(Unit* parent) {
    parent_ = parent;
  }
  bool is_ancestor_of(const Unit& other) const;
  /// Itself first.
  std::vector<Unit*> with_those_below();
  bool reshards_after(Phase phase) const;

  // -- state

  UnitState state() const {
    return state_;
  }
  /// sharded -> arriving. Starts the gather.
  void unshard();
  /// arriving -> whole. The handles have memory when it returns.
  void wait();
  /// any -> sharded. Private copies are written back first. Where it was left for another unit, its last use is known;
  /// in a forward that trains, a share may be kept for the gather of the backward.
  void reshard(Left left = Left::kUnknown);
  /// Another unit is used from now on: where streams are at work, a release comes after the uses so far.
  void leave() {
    uses_.end();
  }
  /// whole -> whole, but a bucket's memory is writable.
  void make_private(Bucket& bucket);
  /// The whole parameters in the shards' own dtypes, on `target`. Collective; the state stays.
  std::unordered_map<const Param*, at::Tensor> put_together(c10::Device target, const char* operation);
  /// any -> whole: writable copies in the shards' own dtypes, on `device`. Collective, whatever state each rank's unit
  /// is in. Unless `show`, only takes part: the state stays.
  void unshard_as_stored(c10::Device device, bool show);
  bool is_private() const;
  /// What was written to a private copy reaches the shard.
  void write_back(const Param& param);
  /// A private copy makes room for one of other data, of the same sizes.
  void go_on_with(Param& param, const at::Tensor& data);
  /// Drops private copies without writing them back.
  void discard_private();
  /// Asked for by the user: kept until it is touched, or a backward has ended a step.
  bool requested = false;
  /// Asked for by an explicit prefetch: kept until it is touched, or backward has ended.
  bool prefetched = false;
  /// Gathered ahead, by the runtime or by the user, and not touched since.
  GatheredFor ahead = GatheredFor::kNobody;
  /// Whether a touch has nothing to do.
  bool is_in_use(Phase phase) const {
    const bool listed_is_fetched = phase == Phase::kForward || used_in_backward || policy.backward_prefetch.empty();
    const bool ordered = !on_streams_ || uses_.goes_on(current_stream(spec_.device));
    return state_ == UnitState::kWhole && ahead == GatheredFor::kNobody && !left_by_backward && listed_is_fetched &&
           ordered;
  }
  /// Whether its gather needs the other ranks.
  bool gathers_together() const {
    return gathers_together_;
  }
  /// Held whole whatever happens: by guards, by an operator that writes to it.
  int held = 0;
  /// By so many guards of summon_full_params, on all ranks, also where they show nothing; of those, by so many that
  /// show it on one rank only, and by so many that drop what is written.
  int summoned = 0, summoned_by_one = 0, summoned_to_read = 0;

  // -- other collectives

  /// Gathers, or reductions, go through a function of the user's. Collective: the shards move.
  void gather_through(CollectiveFn all_gather);
  void reduce_through(CollectiveFn reduce_scatter);
  /// Reductions use a communicator of their own, or the one that gathers use. Collective.
  void separate_reductions(bool separate);
  /// Buffers of the unit's groups lie in memory of their backends, where these have any to give.
  void use_backend_memory(bool enable);
  /// What was chosen of the above for another unit. Collective.
  void exchange_as(const Unit& other);
  bool has_other_gather_group() const {
    return exchange_.all_gather != nullptr;
  }

  // -- shards

  /// Before an operator writes a shard: returns once no rank reads the old value. Cheap when already writing.
  void before_shard_write(Param& param);
  /// Before an operator reads a shard, or any: writes to handles become visible.
  void before_shard_read(const Param* param = nullptr);
  /// Before shards are written by what no operator shows: as `before_shard_write`, of all.
  void expect_unseen_writes();
  /// Where shards' tensors were given other data (`module.to(dtype)`), they move back into a home. Collective then.
  void settle_replaced_shards();
  /// From now on parameters are gathered in this dtype, and inputs cast to it; unset: in their own. A backward through
  /// what was recorded before is an error. Collective.
  void compute_in(std::optional<c10::ScalarType> param_dtype);
  bool has_params_on_meta() const {
    return on_meta_;
  }
  /// An error that names the parameters that have no values yet.
  void check_materialized() const;

  // -- gradients

  c10::ScalarType reduce_dtype_of(const Param& param) const;
  /// From now on they are reduced in the dtype that backward makes them in.
  void reduce_as_computed() {
    spec_.precision.reduce_dtype.reset();
  }
  void expect_gradients(bool first_use_of_param) {
    awaiting_ += first_use_of_param ? 1 : 0;
  }
  /// Whether it is the last of all that were expected.
  bool gradient_came(bool last_use_of_param) {
    awaiting_ -= last_use_of_param ? 1 : 0;
    return last_use_of_param && awaiting_ == 0;
  }
  /// Where streams are at work: a gradient has arrived on the current one. `adds`: to one that may have come on
  /// another.
  void gradient_on_stream(bool adds);
  StreamUses gradient_streams; ///< on which gradients arrived that are not being reduced
  /// Gradients have come since the last reduction; or, without one in this backward, something else has to be reduced:
  /// what an earlier backward put off, zeros in place of gradients that did not come.
  bool awaits_reduction() const;
  /// An earlier backward has left parts of gradients that this one all-reduces.
  bool has_put_off_parts() const;
  bool reduced = false; ///< in this backward
  bool used_in_backward = false;
  bool gathered_in_backward = false;
  bool kept_through_backward = false; ///< whole since the last one
  bool left_by_backward = false; ///< so it is, and is gathered anew where it is used next: shards may have been written
  int64_t gradient_bytes() const;
  /// Gradients wait for a later backward, and users see them until it begins: what they drop is dropped.
  void move_waiting_gradients(WaitingMove move);
  /// Once for each backward.
  void expect_gradients(const BackwardGraph& graph, bool nested);
  void end_backward();
  void forget_uses();
  /// What was kept for a gather among neighbours may be old.
  void drop_shares();
  void follow_requires_grad();
  /// After a step that broke off.
  void reset();

  int64_t whole_bytes() const;
  int64_t predicted_whole_bytes() const;

  Label label(const char* operation) const {
    return {operation, display_name()};
  }

 private:
  explicit Unit(UnitSpec spec);
  void add_params();
  std::vector<layout::ParamLayout> layouts_of_params();
  Bucket& bucket_for(const ParamSpec& param);
  void settle(Bucket& bucket, const char* operation);
  template <typename Gather>
  void or_release(const Gather& gather);
  void before_release(Left left);
  void choose_reduce_groups();
  void look_for_params_on_meta();
  void note_arrival();
  void order_reader();
  void wait_unseen();
  void release(Bucket& bucket);

  // What each touch looks at, together; see Param.
  UnitState state_ = UnitState::kSharded;
  bool on_streams_ = false; // the device has streams
  bool on_meta_ = false; // some parameters are
  bool gathers_together_ = false;
  int awaiting_ = 0; // parameters whose gradients are expected
  int number_ = 0;
  int graph_ = -1; // the backward whose gradients are expected
  Unit* parent_ = nullptr;
  std::shared_ptr<Runtime> runtime_;
  std::vector<std::unique_ptr<Param>> params_;
  std::vector<std::unique_ptr<Bucket>> buckets_;
  // Where streams are at work: the whole parameters are here; the streams that have used them.
  fsdp::Event arrived_;
  StreamUses uses_;

  UnitSpec spec_; // without the parameters, once these are made
  std::string display_name_;
  struct Exchange {
    CollectiveFn all_gather, reduce_scatter; // of the user's, or empty
    bool separate_reductions = false, backend_memory = false;
  };
  Exchange exchange_;
};

} // namespace fsdp::engine
