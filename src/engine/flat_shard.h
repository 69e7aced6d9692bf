#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <fsdp/shown_shard.h>

#include "engine/tenant.h"
#include "engine/waiting_gradient.h"

namespace fsdp::engine {

class FlatBucket;
class Param;

/// The one tensor that users hold where a flat bucket's parameters are shown as one: this rank's whole share, in which
/// the parameters' shards lie, the gaps between them and the padding zero. Optimizers see it, and it has the gradient.
class FlatShard : public std::enable_shared_from_this<FlatShard> {
 public:
  explicit FlatShard(const FlatBucket& bucket);
  ~FlatShard();
  FlatShard(const FlatShard&) = delete;
  FlatShard& operator=(const FlatShard&) = delete;

  const at::Tensor& tensor() const {
    return tensor_;
  }
  const FlatBucket& bucket() const {
    return bucket_;
  }
  /// From now on it is this memory, which holds the parameters' shards; all else there becomes zero.
  void lie_in(void* memory, std::shared_ptr<void> home, c10::Device device);
  /// It was given other data just now: it stays a flat shard, until its unit settles it.
  void was_given_data();
  /// Users have put other data behind it since it lies where it does.
  bool was_replaced() const {
    return replaced_ || !lies_in(tensor_, storage_);
  }
  /// Users have put another tensor in its place.
  void replace(at::Tensor tensor) {
    tensor_ = std::move(tensor);
  }
  /// A parameter's shard in what it is now, or in a tensor like it: its gradient.
  at::Tensor part_of(const Param& param, const at::Tensor& flat) const;
  /// This rank's share of a tensor like the whole flat parameter, copied; zero where no parameter is.
  at::Tensor share_of(const at::Tensor& whole) const;
  /// See Unit. It is one tensor, of which the parameters' gradients become views; zero where no gradient is.
  void move_waiting_gradient(WaitingMove move);
  /// This rank's share of the gradient; undefined if there is none.
  at::Tensor gradient() const {
    return waiting_.own(tensor_);
  }
  /// What the parameters' `ShownShard`s are.
  std::shared_ptr<ShownShard> shown_for(const Param& param);

 private:
  void clear_gaps(const at::Tensor& flat) const;
  at::Tensor put_gradients_together();

  const FlatBucket& bucket_;
  at::Tensor tensor_;
  WaitingGradient waiting_;
  WeakStorage together_; // of which the parameters' gradients are views, once they have been put together
  WeakStorage storage_; // in which it lies; users may give it other data
  bool replaced_ = false; // and it has the keys already
};

/// Null for any other tensor.
FlatShard* flat_shard_of(const at::Tensor& tensor);

} // namespace fsdp::engine
