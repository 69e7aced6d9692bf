#include "comm/shm/arena.h"

#include <algorithm>
#include <mutex>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include "base/check.h"
#include "base/env.h"
#include "base/format.h"
#include "comm/memory_limit.h"
#include "comm/shm/blocks.h"

namespace fsdp::shm {
namespace {

// What is kept while nobody asked for it, so that small blocks that come and go cost no page faults.
constexpr size_t kKeptAnyway = size_t{16} << 20;
constexpr size_t kTooBigToKeep = size_t{4} << 20;

// Addresses only; smaller where address space is limited. Every process maps the arenas of all processes of the host: a
// quarter of the 47 bits of addresses is for them, divided among as many as may ever be.
std::shared_ptr<Segment> reserve() {
  constexpr size_t kAtLeast = size_t{1} << 30;
  constexpr size_t kAtMost = (size_t{1} << 45) / 256;
  for (size_t bytes = std::clamp(2 * memory_limit(), kAtLeast, kAtMost);; bytes /= 2) {
    try {
      return Segment::create("fsdp-arena", bytes / 4096 * 4096, Access::kWrite);
    } catch (const Error&) {
      if (bytes / 2 < kAtLeast) {
        throw;
      }
    }
  }
}

c10::Allocator& ordinary() {
  static c10::Allocator* allocator = c10::GetDefaultCPUAllocator();
  return *allocator;
}

void free_tensor_memory(void* memory) {
  if (Arena& arena = Arena::of_process(); arena.contains(memory)) {
    c10::profiledCPUMemoryReporter().Delete(memory);
    arena.give_back(memory);
  } else if (memory) {
    ordinary().raw_deallocate(memory);
  }
}

// [Note: one deleter] oneDNN allocates and frees through raw pointers, so the deleter gets nothing but the address: it
// tells by the address where the memory came from, and the context is the address itself.
class TensorAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes >= Arena::kSmallestBlock ? Arena::of_process().take_for_tensor(bytes) : nullptr;
    if (memory) {
      c10::profiledCPUMemoryReporter().New(memory, bytes);
    } else {
      memory = ordinary().raw_allocate(bytes);
    }
    return {memory, memory, &free_tensor_memory, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_tensor_memory;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

} // namespace

struct Arena::Impl {
  mutable std::mutex mutex;
  std::shared_ptr<Segment> segment = reserve();
  Blocks blocks{segment->bytes()};
  size_t share = 0; // that tensors may take once they are served
  size_t cap = 0; // for tensors
  int keepers = 0; // who want freed blocks kept
  size_t kept = 0; // about as many bytes of free blocks hold memory
  bool inherited = false; // by fork: the memory is the parent's

  void* take(size_t bytes, char* base) {
    const Blocks::Block block = blocks.take(bytes);
    kept -= std::min(kept, block.bytes);
    return block.bytes > 0 ? base + block.offset : nullptr;
  }
  void drop_kept() {
    blocks.drop_free([this](size_t offset, size_t bytes) { segment->punch(offset, bytes); });
    kept = 0;
  }

  static void before_fork() {
    Arena::of_process().impl_->mutex.lock();
  }
  static void after_fork_in_parent() {
    Arena::of_process().impl_->mutex.unlock();
  }
  // A forked child keeps its tensors, on pages of its own as soon as it writes, and takes new memory elsewhere.
  static void after_fork_in_child() {
    Arena::of_process().impl_->inherited = true;
    Arena::of_process().impl_->mutex.unlock();
  }
};

Arena& Arena::of_process() {
  static auto* arena = new Arena;
  return *arena;
}

Arena::Arena() : impl_(new Impl), base_(impl_->segment->writable()), capacity_(impl_->segment->bytes()) {
  impl_->segment->keep_in_children();
  pthread_atfork(&Impl::before_fork, &Impl::after_fork_in_parent, &Impl::after_fork_in_child);
}

const SegmentId& Arena::id() const {
  return impl_->segment->id();
}

size_t Arena::share_for_tensors(size_t memory, int processes_on_host, size_t capacity) {
  return std::min(memory / static_cast<size_t>(std::max(1, processes_on_host)), capacity) / 4 * 3;
}

void Arena::offer_to_tensors(int processes_on_host) {
  static auto* allocator = new TensorAllocator;
  constexpr int64_t kMebibyte = 1 << 20;
  const size_t share = share_for_tensors(memory_limit(), processes_on_host, capacity_);
  const auto chosen = env::integer("FSDP_ARENA_MB", 0, static_cast<int64_t>(capacity_) / kMebibyte);
  {
    std::lock_guard lock(impl_->mutex);
    impl_->share = chosen ? static_cast<size_t>(*chosen * kMebibyte) : share;
  }
  constexpr uint8_t kAboveTheDefault = 1;
  c10::SetCPUAllocator(allocator, kAboveTheDefault);
}

void Arena::serve_tensors() {
  std::lock_guard lock(impl_->mutex);
  impl_->cap = impl_->share;
}

void* Arena::take(size_t bytes) {
  std::lock_guard lock(impl_->mutex);
  FSDP_CHECK(
      !impl_->inherited, "[shared memory] a forked child cannot take its parent's place in a group; start a process");
  void* memory = impl_->take(bytes, base_);
  FSDP_CHECK(
      memory,
      "[shared memory] no room for ",
      human_bytes(static_cast<int64_t>(bytes)),
      " that other ranks have to read: ",
      human_bytes(static_cast<int64_t>(impl_->blocks.bytes_in_use())),
      " are in use; set FSDP_ARENA_MB lower");
  return memory;
}

void* Arena::take_for_tensor(size_t bytes) {
  std::lock_guard lock(impl_->mutex);
  if (impl_->inherited || impl_->blocks.bytes_in_use() + bytes > impl_->cap) {
    return nullptr;
  }
  return impl_->take(bytes, base_);
}

void Arena::give_back(void* memory) {
  std::lock_guard lock(impl_->mutex);
  if (impl_->inherited) {
    return;
  }
  const size_t bytes = impl_->blocks.give_back(offset(memory));
  if (impl_->keepers == 0 && bytes >= kTooBigToKeep) {
    impl_->segment->punch(offset(memory), bytes);
    return;
  }
  impl_->kept += bytes;
  if (impl_->keepers == 0 && impl_->kept > kKeptAnyway) {
    impl_->drop_kept();
  }
}

void Arena::start_keeping() {
  std::lock_guard lock(impl_->mutex);
  ++impl_->keepers;
}

void Arena::stop_keeping() {
  std::lock_guard lock(impl_->mutex);
  if (--impl_->keepers == 0 && !impl_->inherited) {
    impl_->drop_kept();
  }
}

size_t Arena::bytes_in_use() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->blocks.bytes_in_use();
}

} // namespace fsdp::shm
