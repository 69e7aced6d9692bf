#pragma once

#include <cstddef>
#include <vector>

namespace fsdp::engine {

enum class Phase : char { kForward, kBackward };

/// The order in which units are touched, learned from the last complete step. Only ever advice: a step that takes
/// another path is right all the same, and is what is expected of the next. Pure logic over unit numbers. Not thread
/// safe.
class Schedule {
 public:
  struct Touch {
    int unit;
    Phase phase;
    bool operator==(const Touch&) const = default;
  };

  /// `repeats`: no one calls `end_step`; the step is complete when its first unit is touched again (evaluation has no
  /// backward).
  explicit Schedule(bool repeats = false) : repeats_(repeats) {}

  /// Call when another unit, or the same in another phase, is touched than at the last call.
  void touched(Touch touch);
  /// The step is complete: what was recorded is expected from now on.
  void end_step();
  /// The step broke off: what was recorded of it does not count.
  void abandon_step();

  /// Whether this step has followed what was expected so far (or found back to it).
  bool known() const {
    return following_;
  }
  /// The touches expected next, nearest first, of each unit its first, without the unit touched last.
  std::vector<Touch> upcoming(size_t count) const;

 private:
  bool resume_at(Touch touch);

  // A step longer than this is not learned.
  static constexpr size_t kLongest = 1 << 16;

  bool repeats_;
  std::vector<Touch> expected_;
  std::vector<Touch> recorded_;
  size_t next_ = 0; // in expected_, while following_
  bool following_ = false;
};

} // namespace fsdp::engine
