#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/group.h>

#include "base/stream.h"

namespace fsdp::engine {

class Bucket;
class Param;
class Unit;

/// Brings whole gradients to the shards: reduce-scatter, on hybrid meshes all-reduce, division, and into the shard's
/// gradient. Whole gradients of a bounded number of reductions are in flight, and the slices of one more on hybrid
/// meshes, whose all-reduce goes on while the next is reduce-scattered. They finish in the order in which they were
/// submitted, which is the same on all ranks. Not thread safe: the runtime's lock covers it.
class Reducer {
 public:
  Reducer();
  ~Reducer();

  /// Takes over the unit's whole gradients and starts their reduction.
  void submit(Unit& unit);
  /// Lets reductions in flight go on if that needs no waiting.
  void progress();
  /// Waits for all that was submitted.
  void finish();
  /// Gives offloaded shards the gradients that are on their way to the host; that is where the host waits for a device.
  void deliver_copies();
  /// A gradient on its way to its shard. Users' functions run when it gets there, hence without the runtime's lock.
  struct Delivery {
    std::shared_ptr<Unit> unit; // which they may let go of
    Param* param;
    at::Tensor gradient;
  };
  std::optional<Delivery> next_delivery();
  bool has_deliveries() const {
    return !deliveries_.empty();
  }
  /// Forgets what of it is in flight: it is about to go, or something has failed.
  void forget(const Unit& unit);

  int in_flight() const {
    return static_cast<int>(running_.size());
  }
  int64_t bytes_in_flight() const;
  void set_max_in_flight(int64_t count) {
    max_in_flight_ = count;
  }
  int64_t max_in_flight() const {
    return max_in_flight_;
  }

 private:
  struct Reduction;
  void submit(Unit& unit, Bucket& bucket, c10::ScalarType dtype);
  void come_after_deliveries(const Unit& unit);
  void given_here(const Unit& unit);
  static void start_reduce_scatter(Reduction& reduction, c10::ScalarType dtype);
  static void end_reduce_scatter(Reduction& reduction);
  static void start_all_reduce(Reduction& reduction);
  void make_room();
  static void give_up_wholes(Reduction& reduction);
  void finish_oldest();
  void deliver(Reduction& reduction);
  void deliver(Param& param, at::Tensor gradient);
  void start_copies(const Reduction& reduction);
  static void let_go(const Reduction& reduction);

  struct Arrived {
    Param* param; // not kept alive, as it goes with its model
    at::Tensor gradient;
  };

  std::deque<std::unique_ptr<Reduction>> running_;
  std::deque<Arrived> copied_; // on its way into page-locked memory; the shard's when backward ends
  std::deque<Arrived> deliveries_; // reduced, and not given to the shard yet
  std::vector<Stream> given_on_; // where shards got theirs since the last reduction began: these are read there
  int64_t max_in_flight_ = 1; // the bound on memory
};

} // namespace fsdp::engine
