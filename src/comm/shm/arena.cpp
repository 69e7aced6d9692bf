#include "comm/shm/arena.h"

#include <algorithm>
#include <mutex>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>

#include "base/check.h"
#include "base/env.h"
#include "base/format.h"
#include "base/private_memory.h"
#include "comm/memory_limit.h"
#include "comm/shm/whole.h"

namespace fsdp::shm {
namespace {

// What is kept while nobody asked for it, so that small blocks that come and go cost no page faults.
constexpr size_t kKeptAnyway = size_t{16} << 20;
constexpr size_t kTooBigToKeep = size_t{4} << 20;

constexpr size_t kAtLeast = size_t{1} << 30;

// Addresses only; smaller where address space is limited.
std::shared_ptr<Segment> reserve() {
  for (size_t bytes = Arena::wanted_bytes();; bytes /= 2) {
    try {
      return Segment::create("fsdp-arena", bytes / kPage * kPage, Access::kWrite);
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
    const bool shared = bytes >= Arena::kSmallestBlock && !PrivateMemory::wanted();
    void* memory = shared ? Arena::of_process().take_for_tensor(bytes) : nullptr;
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

// Every process maps the arenas of all processes of the host: a quarter of the 47 bits of addresses is for them,
// divided among as many as may ever be.
size_t Arena::wanted_bytes() {
  constexpr size_t kAtMost = (size_t{1} << 45) / 256;
  return std::clamp(2 * memory_limit(), kAtLeast, kAtMost);
}

Arena& Arena::of_process() {
  static auto* arena = new Arena;
  return *arena;
}

Arena::Arena() : segment_(reserve()), base_(segment_->writable()), capacity_(segment_->bytes()), blocks_(capacity_) {
  segment_->keep_in_children();
  pthread_atfork(
      [] { of_process().mutex_.lock(); },
      [] { of_process().mutex_.unlock(); },
      [] { // a forked child keeps its tensors, on pages of its own as soon as it writes, and takes new memory elsewhere
        of_process().inherited_ = true;
        of_process().mutex_.unlock();
      });
}

void* Arena::take_block(size_t bytes) {
  const Blocks::Block block = blocks_.take(bytes);
  kept_ -= std::min(kept_, block.bytes);
  return block.bytes > 0 ? base_ + block.offset : nullptr;
}

void Arena::drop_kept() {
  blocks_.drop_free([this](size_t offset, size_t bytes) { segment_->punch(offset, bytes); });
  kept_ = 0;
}

const SegmentId& Arena::id() const {
  return segment_->id();
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
    std::lock_guard lock(mutex_);
    share_ = chosen ? static_cast<size_t>(*chosen * kMebibyte) : share;
  }
  constexpr uint8_t kAboveTheDefault = 1;
  c10::SetCPUAllocator(allocator, kAboveTheDefault);
}

void Arena::serve_tensors() {
  std::lock_guard lock(mutex_);
  cap_ = share_;
}

void* Arena::take(size_t bytes) {
  std::lock_guard lock(mutex_);
  FSDP_CHECK(!inherited_, "[shared memory] a forked child cannot take its parent's place in a group; start a process");
  void* memory = take_block(bytes);
  FSDP_CHECK(
      memory,
      "[shared memory] no room for {} that other ranks have to read: {} are in use; set FSDP_ARENA_MB lower",
      human_bytes(static_cast<int64_t>(bytes)),
      human_bytes(static_cast<int64_t>(blocks_.bytes_in_use())));
  return memory;
}

void* Arena::take_for_tensor(size_t bytes) {
  std::lock_guard lock(mutex_);
  if (inherited_ || blocks_.bytes_in_use() + bytes > cap_) {
    return nullptr;
  }
  return take_block(bytes);
}

void Arena::give_back(void* memory) {
  std::lock_guard lock(mutex_);
  if (inherited_) {
    return;
  }
  const size_t bytes = blocks_.give_back(offset(memory));
  if (keepers_ == 0 && bytes >= kTooBigToKeep) {
    segment_->punch(offset(memory), bytes);
    return;
  }
  kept_ += bytes;
  if (keepers_ == 0 && kept_ > kKeptAnyway) {
    drop_kept();
  }
}

std::shared_ptr<void> Arena::keep_freed() {
  {
    std::lock_guard lock(mutex_);
    ++keepers_;
  }
  return {this, [](Arena* arena) {
            std::lock_guard lock(arena->mutex_);
            if (--arena->keepers_ == 0 && !arena->inherited_) {
              arena->drop_kept();
            }
          }};
}

size_t Arena::bytes_in_use() const {
  std::lock_guard lock(mutex_);
  return blocks_.bytes_in_use();
}

} // namespace fsdp::shm
