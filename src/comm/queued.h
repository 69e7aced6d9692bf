#pragma once

#include <utility>
#include <vector>

#include <fsdp/group.h>

#include "base/stream.h"

namespace fsdp {

/// Whole pieces in memory of this rank, which belongs to the stream that is current at the gather. `bytes`: what is
/// there for them alone.
class CopiedOut final : public Gathered {
 public:
  CopiedOut(std::vector<at::Tensor> pieces, c10::Device device, int64_t bytes)
      : pieces_(std::move(pieces)), stream_(current_stream(device)), bytes_(bytes) {}
  ~CopiedOut() override {
    order_release([this] { wait_stream(stream_, current_stream(stream_.device())); });
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
