#pragma once

#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include <fsdp/group.h>

#include "base/log.h"
#include "base/stream.h"

namespace fsdp {

/// For destructors: `stream` waits for what the current stream of its device has queued. Where the device has failed,
/// which nobody can be told there, the next call on it fails.
inline void follow_current_stream(const Stream& stream) noexcept {
  try {
    wait_stream(stream, current_stream(stream.device()));
  } catch (const std::exception& error) {
    const std::string_view text = error.what(); // c10's goes on with a stack
    log::error("the memory of a gather was given back on a device that fails: {}", text.substr(0, text.find('\n')));
  }
}

/// Whole pieces in memory of this rank, which belongs to the stream that is current at the gather. `bytes`: what is
/// there for them alone.
class CopiedOut final : public Gathered {
 public:
  CopiedOut(std::vector<at::Tensor> pieces, c10::Device device, int64_t bytes)
      : pieces_(std::move(pieces)), stream_(current_stream(device)), bytes_(bytes) {}
  ~CopiedOut() override {
    follow_current_stream(stream_);
  }
  void wait() override {
    wait_stream(current_stream(stream_.device()), stream_);
  }
  void* piece(size_t index) const override {
    return pieces_[index].data_ptr();
  }
  int64_t bytes() const override {
    return bytes_;
  }

 private:
  std::vector<at::Tensor> pieces_;
  Stream stream_;
  int64_t bytes_;
};

/// All of it is queued on the stream that is current when it is made, or done.
class Queued final : public Work {
 public:
  explicit Queued(c10::Device device) : stream_(current_stream(device)) {}
  bool done() override {
    return true;
  }
  void wait() override {
    wait_stream(current_stream(stream_.device()), stream_);
  }

 private:
  Stream stream_;
};

} // namespace fsdp
