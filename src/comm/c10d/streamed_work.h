#pragma once

#include <utility>

#include <c10/core/GradMode.h>

#include <fsdp/group.h>

#include "base/stream.h"
#include "comm/c10d/channel.h"

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

} // namespace fsdp::adapter
