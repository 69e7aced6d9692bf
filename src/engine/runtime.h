#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include "base/stream.h"
#include "engine/forward_graph.h"
#include "engine/reducer.h"
#include "engine/schedule.h"

namespace fsdp::engine {

class BackwardGraph;
class Param;
class Unit;
enum class GatheredFor : char;
class WaitingGradient;

enum class EventKind { kUnshard, kWait, kReshard, kReduce, kReduced, kEndBackward };

/// Something the engine did, in the order in which it did it: for tests and traces.
struct Event {
  EventKind kind;
  const std::string* unit; ///< null for events of the whole model
  int whole_units; ///< units arriving or whole, after the event
  int64_t whole_bytes; ///< memory this rank pays for them
  int reducing; ///< reductions in flight
  int64_t gradient_bytes; ///< whole gradients that have arrived and are not reduced
};

using Observer = std::function<void(const Event&)>;

/// The units that one operator touches.
using TouchedUnits = c10::SmallVector<Unit*, 4>;

/// What all units below one root share: device streams, schedule, reductions in flight. Decides when units are
/// unsharded and resharded; the units know how. Thread safe: backward may run on other threads than forward.
class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  explicit Runtime(c10::Device device);
  ~Runtime();

  std::unique_lock<std::recursive_mutex> lock();

  // -- units

  void add(Unit& unit);
  void remove(Unit& unit);
  /// By number. Parents come before the units below them.
  const std::vector<Unit*>& units() const {
    return units_;
  }
  /// Those that live; others may go meanwhile.
  template <class Body>
  void each_unit(const Body& body) const {
    for (Unit* unit : units_) {
      if (unit != nullptr) {
        body(*unit);
      }
    }
  }
  template <class Is>
  bool any_unit(const Is& is) const {
    return std::any_of(units_.begin(), units_.end(), [&](const Unit* unit) { return unit != nullptr && is(*unit); });
  }
  /// A unit that no handle keeps lives as long as others.
  void keep(std::shared_ptr<Unit> unit);
  /// Takes over the units of another runtime, numbered after its own.
  void adopt(Runtime& other);

  // -- what happens in a step

  /// Whether an operator of this thread belongs to a step, else to an evaluation.
  static bool trains(Phase phase);
  /// An operator is about to read handles of these units: makes them whole. Of what is whole already nothing is
  /// learned, and nothing follows: one rank may look at it alone.
  void touch(const TouchedUnits& units);
  /// In which what is read in a backward is read, or in none (-1): see [Note: forwards within backwards].
  Phase phase_in(int task) const {
    return task < 0 || task == step_.within ? Phase::kForward : Phase::kBackward;
  }
  /// Whether no shard can have been written since it was gathered, except by operators; as far as touches tell.
  bool sees_all_writes() const {
    return !unseen_writes_;
  }
  /// Whether reads to train, outside of backwards, are noted already: one more tells nothing new.
  bool reads_are_noted() const {
    return step_.is_read && recorded_.until == Recorded::kOn;
  }
  /// Whether a step is to begin, which only `begin_step` with certainty ends.
  bool awaits_step() const {
    return awaits_step_;
  }
  /// Shards may have been written by what no operator shows: the next gathers come after that.
  void expect_unseen_writes();
  /// Shards are new, on all ranks: what fills them may be unseen, too.
  void expect_first_values(const char* operation);
  /// A step begins, on all ranks. `certainly`: the program has said so, where else a touch is all there is.
  void begin_step(bool certainly);
  /// A handle is about to be written outside a step.
  void write(Unit& unit, Param& param);
  /// A use of a trainable parameter whose graph is being recorded: a step has begun.
  void forward_begins();
  /// Calls of sharded modules that run on this thread: what is recorded in one is a forward. Other graphs on parameters
  /// may be made outside, such as that of the product which a low-rank adapter adds to a weight for good.
  static inline thread_local int running_calls = 0;
  static inline thread_local bool call_trains = false; ///< the outermost of them
  /// The program says when modules are called: a graph made outside of all calls is no forward.
  void expect_calls() {
    expects_calls_ = true;
  }
  /// The program says when a step begins: its root is being called to train.
  void note_call();
  void call_ends();
  /// Custom functions ask handles whether they require gradients before any operator sees them.
  void follow_requires_grad();
  /// A profiler that notes what operators are given (`record_shapes`) sees them before we do. Asks whether one does.
  void follow_profiler();
  /// Whether handles without memory may be asked where it is.
  bool is_looked_at() const {
    return looked_at_;
  }
  /// Between a forward and the end of its backward, which still needs the values that handles had: as long as what was
  /// recorded lives, where the program says when modules are called.
  bool needs_old_values();
  /// Whether the step has a forward, and no backward yet.
  bool in_forward() const {
    return step_.has_forward;
  }
  /// Whether a backward has reached a unit and is not over.
  bool in_backward() const {
    return backward_.runs;
  }
  /// The same, or one is on its way to a unit through a forward's graph, on this thread.
  bool backward_runs() const;
  void gradient_arrived(Param& param, const at::Tensor& handle);
  /// Not by way of a handle: the first of a backward, perhaps, while others of the shard wait in its `grad`.
  void gradient_comes_to_shard(const WaitingGradient& waiting);
  /// A shard gets its gradient when the lock is free: an optimizer may be about to step then.
  void gradient_delivered(Param& param, const at::Tensor& gradient);
  void set_is_last_backward(bool last) {
    is_last_backward_ = last;
  }
  void end_backward();
  /// What `begin_backward` queued was dropped: the backward of this number ended in an exception.
  void backward_broke(int64_t number);
  /// After a step that broke off: all units are sharded, nothing is in flight, no gradient is pending.
  void reset();

  Reducer& reducer() {
    return reducer_;
  }
  /// After changes of `UnitPolicy::max_reductions`.
  void bound_reductions();

  // -- streams; on the CPU all of them are the one there is

  Stream gather_stream() const {
    return gather_stream_;
  }
  Stream reduce_stream() const {
    return reduce_stream_;
  }
  /// All-reduces across replicas: the next reduce-scatter need not wait for them.
  Stream all_reduce_stream() const {
    return all_reduce_stream_;
  }
  /// Before a gather starts on the gather stream: it waits for those who wrote shards.
  void order_gather();
  /// Shards are about to be written.
  void shards_change() {
    shards_changed_ = true;
  }
  /// By an operator.
  void note_seen_write() {
    writes_are_seen_ = writes_are_seen_ || unseen_writes_;
  }
  /// What follows on a group that shards are read in is in the write phase of the write that was seen.
  void end_unseen_writes(const std::shared_ptr<Group>& group);
  bool trains_something() const;
  /// After it the optimizer of this root's units has written.
  void set_post_optim_event(const Unit& root, std::shared_ptr<c10::Event> event);

  // -- being watched

  void set_observer(Observer observer) {
    observer_ = std::move(observer);
  }
  void unit_changed(Unit& unit, EventKind kind);
  /// What a unit says of itself has changed.
  void look_at_units();
  /// How many units ahead of the one touched are gathered.
  void set_prefetch(size_t count) {
    prefetch_ = count;
  }
  size_t prefetched() const {
    return prefetch_;
  }

 private:
  /// What there has been of a step, until it is over.
  struct Step {
    bool has_begun = false;
    bool has_forward = false; // which made its graph
    bool is_read = false; // to train, and not in a backward
    int within = -1; // a backward of others: see [Note: forwards within backwards]
    bool graph_grows = false; // calls have recorded more than is known
  };
  /// Where calls, and reads outside of them, may have recorded.
  struct Recorded {
    static constexpr uint64_t kOn = std::numeric_limits<uint64_t>::max();
    uint64_t until = 0; // a node's number
    uint64_t thread = 0; // which counts them
  };
  struct Found;
  struct Backward {
    bool runs = false; // and its end is queued
    int graph = -1;
    bool has_gradients = false;
    bool may_repeat = false;
    bool is_for_all = true; // leaves
  };

  void end_step();
  void begin_backward();
  bool take_gradient(Param& param, const at::Tensor& handle); // whether there is something to deliver
  void finish_backward();
  void deliver_gradients();
  bool takes_note(const Unit& unit, bool training) const;
  bool leads_here(const BackwardGraph& graph) const;
  bool backward_is_of_others() const;
  /// Whether it is known that a module is being called; to train, though custom functions do not record what they read.
  bool in_call() const {
    return expects_calls_ && running_calls > 0;
  }
  bool in_training_call() const {
    return call_trains && in_call();
  }
  Schedule& schedule_of(bool training) {
    return training ? training_ : evaluating_;
  }
  bool is_look(const Unit& unit, Phase phase, bool training) const;
  void look_at(Unit& unit, bool training);
  void use(Unit& unit, Phase phase, bool training, Found& found);
  bool is_first_touch(const Unit& unit, bool training) const;
  bool is_by_all(const TouchedUnits& units) const;
  void renew_in_place(const TouchedUnits& units, bool training);
  GatheredFor gathered_for(const Schedule& schedule, Phase phase) const;
  /// `by_all`: else only of units that are gathered without the other ranks.
  void release_left_behind(
      const TouchedUnits& touched, Phase phase, const Schedule& schedule, const Unit* before, bool by_all);
  static bool stays(const Unit& unit, const TouchedUnits& touched, Phase phase);
  void prefetch_listed(const Unit& unit, Phase phase, bool training);
  void prefetch(const Unit& unit, Phase phase, const Schedule& schedule);
  static void gather_ahead(Unit& unit, GatheredFor whom);
  void wait_for_writes(const Stream& stream);
  void open_for_unseen_writes();
  void end_unseen_writes();
  /// Of units that others read in place.
  void begin_unseen_writes(const std::vector<Unit*>& units);
  void check_not_broken(const char* operation) const;
  void look_at_forward_graph();
  void reduce(Unit& unit);
  void reduce_what_waits();
  void notify(EventKind kind, const Unit* unit);
  void trace(const Event& event);
  Event make_event(EventKind kind, const Unit* unit) const;

  std::recursive_mutex mutex_;
  c10::Device device_;
  Stream gather_stream_;
  Stream reduce_stream_;
  Stream all_reduce_stream_;
  std::unordered_map<const Unit*, std::shared_ptr<c10::Event>>
      post_optim_events_; // of roots; protect shards from being gathered before the optimizer has written them

  std::vector<Unit*> units_; // null where one was destroyed; index is its number
  std::vector<Unit*> unsharded_; // in the order in which they left the sharded state
  std::vector<std::shared_ptr<Unit>> kept_;
  Schedule training_;
  Schedule evaluating_{/*repeats=*/true};
  Reducer reducer_;

  Unit* last_ = nullptr; // of which note was taken
  bool any_gathers_together_ = false;
  bool shards_changed_ = true; // since the last gather
  bool unseen_writes_ = false; // possible since backward has ended, or the program said so
  bool writes_are_seen_ = false; // an optimizer has written by operators then, and is expected to go on so
  bool awaits_step_ = false; // since then
  bool calls_are_noted_ = false; // the program says when a step begins
  std::atomic<bool> looked_at_ = false; // by a profiler
  std::vector<Unit*> delivered_; // whose shards got gradients since then
  std::map<Group*, std::vector<const void*>> changes_; // some places in shards that an optimizer changes by these
  std::vector<std::shared_ptr<Group>> written_unseen_; // those whose shards may be written so
  Step step_;
  ForwardGraph forward_graph_; // of the calls in this step, as far as it is known
  bool expects_calls_ = false;
  Recorded recorded_;
  Backward backward_;
  std::atomic<int64_t> backwards_ = 0; // counts them, and resets
  std::atomic<bool> broken_ = false;
  bool is_last_backward_ = true;
  size_t prefetch_ = 1;
  Observer observer_;
  int64_t predicted_bytes_ = 0; // for traces
};

} // namespace fsdp::engine
