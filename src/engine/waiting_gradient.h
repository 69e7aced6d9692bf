#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace fsdp::engine {

/// A whole gradient that no backward has reduced yet, in the place of a shard's own: so that users see it, and drop it
/// as they drop any other.
class WaitingGradient {
 public:
  bool is_shown() const {
    return whole_.defined();
  }
  void show(const at::Tensor& shard, at::Tensor whole);
  /// The shard has its own again. Whether users have left the whole one there.
  bool take_back(const at::Tensor& shard, const std::string& name);
  /// The shard's own, whichever is shown.
  at::Tensor own(const at::Tensor& shard) const;

 private:
  at::Tensor whole_; // undefined unless it is shown
  at::Tensor own_; // meanwhile
};

} // namespace fsdp::engine
