#pragma once

#include <memory>
#include <optional>
#include <string>

#include <c10/core/Device.h>

#include <fsdp/group.h>

namespace fsdp {

/// The job as one rank sees it. `rank()` and `world_size()` are those of `group`.
struct World {
  std::shared_ptr<Group> group;
  int local_rank = 0;
  c10::Device device = c10::kCPU;
};

/// This thread's world inside `thread_group`, else the process's; null before `init` and after `shutdown`.
const World* current_world();

/// Nothing for what names no device.
std::optional<c10::Device> find_device(const std::string& text);

/// While it lives, the calling thread has a world of its own. Neither copied nor moved to another thread.
class ThreadWorld {
 public:
  explicit ThreadWorld(World world);
  ~ThreadWorld();
  ThreadWorld(const ThreadWorld&) = delete;
  ThreadWorld& operator=(const ThreadWorld&) = delete;

 private:
  World world_;
  const World* outer_;
};

} // namespace fsdp
