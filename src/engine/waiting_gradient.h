#pragma once

#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

namespace fsdp::engine {

class Unit;

/// What becomes of gradients that no backward has reduced yet: users see them until the next one begins.
enum class WaitingMove : char { kShow, kTakeBack };

/// A whole gradient that no backward has reduced yet, in the place of a shard's own: so that users see it, and drop it
/// as they drop any other.
class WaitingGradient {
 public:
  bool is_shown() const {
    return whole_.defined();
  }
  void show(const at::Tensor& shard, at::Tensor whole, Unit& unit);
  /// The shard has its own again. Whether users have left the whole one there.
  bool take_back(const at::Tensor& shard, const std::string& name);
  /// The shard's own, whichever is shown.
  at::Tensor own(const at::Tensor& shard) const;

 private:
  /// A gradient that comes to the shard by itself, a penalty's on what users see, is to be added to the shard's own.
  void watch(const at::Tensor& shard, Unit& unit);

  std::shared_ptr<const void> watched_; // what adds to the shard's `grad`
  at::Tensor whole_; // undefined unless it is shown
  at::Tensor own_; // meanwhile
};

} // namespace fsdp::engine
