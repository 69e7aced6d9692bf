#pragma once

#include <memory>
#include <vector>

#include <fsdp/group.h>

#include "base/stream.h"
#include "comm/c10d/channel.h"
#include "comm/payload.h"

namespace fsdp::adapter {

/// Slices in memory that only this rank sees, gathered by copying them to every rank. Not thread safe.
class PrivateHome final : public Home {
 public:
  PrivateHome(std::shared_ptr<Channel> channel, std::vector<Piece> pieces, const HomeOptions& options);

  void* slice(size_t index) const override;
  void begin_write(const Label& label) override;
  std::unique_ptr<Gathered> gather(const Label& label) override;

 private:
  at::Tensor sendable();

  std::shared_ptr<Channel> channel_;
  std::shared_ptr<const GatherPlan> plan_; // a Gathered may outlive its home
  std::shared_ptr<BufferPool::Idle> idle_buffers_; // kept from one gather or reduction to the next, as long as a home
  at::Tensor memory_;
  std::weak_ptr<Pending> reading_; // the collective that may still read `memory_`
  Event copied_; // the copy from host memory to the device, which the next write has to wait for
};

} // namespace fsdp::adapter
