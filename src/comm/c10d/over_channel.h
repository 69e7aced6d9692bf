#pragma once

#include <memory>
#include <vector>

#include <c10/core/GradMode.h>

#include <fsdp/group.h>

#include "base/stream.h"
#include "comm/c10d/channel.h"

/// What a group does over its channel, one file each.
namespace fsdp::adapter {

/// A collective and what follows it, which runs on the stream that started the collective.
class StreamedWork : public Work {
 public:
  explicit StreamedWork(c10::Device device) : stream_(current_stream(device)) {}

  bool done() final {
    return finished_ || pending_.done();
  }

  void wait() final {
    if (finished_) {
      return;
    }
    const Stream reader = current_stream(stream_.device());
    {
      const c10::NoGradGuard no_grad;
      const StreamGuard on_our_stream(stream_);
      pending_.finish();
      conclude();
      finished_ = true;
    }
    wait_stream(reader, stream_);
  }

 protected:
  virtual void conclude() = 0;

  Pending pending_;

 private:
  Stream stream_;
  bool finished_ = false;
};

/// Slices in memory that only this rank sees, gathered by copying them to every rank. Not thread safe.
std::shared_ptr<Home> make_private_home(
    std::shared_ptr<Channel> channel, std::vector<Piece> pieces, const HomeOptions& options);

/// Starts an all-reduce in place.
std::unique_ptr<Work> start_all_reduce(
    std::shared_ptr<Channel> channel, at::Tensor tensor, ReduceOp op, double divide_by, const Label& label);

/// Starts a reduce-scatter over c10d: copies the wholes together rank by rank, lets the backend sum, copies into the
/// slices.
std::unique_ptr<Work> start_reduce_scatter(std::shared_ptr<Channel> channel, ReduceScatter args, const Label& label);

} // namespace fsdp::adapter
