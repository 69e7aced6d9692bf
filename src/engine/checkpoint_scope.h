#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <fsdp/export.h>

namespace fsdp::engine {

class BackwardGraph;

/// Around the first run of a checkpointed function, in which no graph is recorded: parameters touched in it will bring
/// a gradient all the same, when the segment is recomputed.
class FSDP_API CheckpointForward {
 public:
  CheckpointForward();
  ~CheckpointForward();
  CheckpointForward(const CheckpointForward&) = delete;
  CheckpointForward& operator=(const CheckpointForward&) = delete;

  /// The innermost segment of this thread; -1 outside of any.
  static int64_t current();

 private:
  int64_t outer_;
};

/// Around a segment's recomputation and the backward nested in it: construct it first thing in the node's backward.
/// What the nested backward does ends with the outer one.
class FSDP_API CheckpointBackward {
 public:
  CheckpointBackward();
  ~CheckpointBackward();
  CheckpointBackward(const CheckpointBackward&) = delete;
  CheckpointBackward& operator=(const CheckpointBackward&) = delete;

  static bool active();
  /// The backward around all that is nested on this thread; the one that runs, if there is no such scope.
  static BackwardGraph outermost();
  /// To be run when it ends.
  static void at_end(std::function<void()> run);

 private:
  struct Outermost;
  std::shared_ptr<Outermost> around_;
};

} // namespace fsdp::engine
