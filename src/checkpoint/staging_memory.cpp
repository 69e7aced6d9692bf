#include "checkpoint/staging_memory.h"

#include <mutex>
#include <utility>

#include <ATen/ops/from_blob.h>

#include "base/check.h"

namespace fsdp::disk {

namespace {

constexpr int64_t kAlignment = 64;

std::mutex& mutex_of_kept() {
  static auto* mutex = new std::mutex; // as long as any thread
  return *mutex;
}

} // namespace

StagingMemory::Memory& StagingMemory::kept() {
  static auto* memory = new Memory;
  return *memory;
}

StagingMemory::StagingMemory(int64_t bytes, bool keep) : bytes_(bytes), keep_(keep) {
  {
    const std::lock_guard lock(mutex_of_kept());
    memory_ = std::exchange(kept(), {});
  }
  if (memory_.bytes < bytes) {
    memory_ = {}; // before there is more
    memory_ = {std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes + kAlignment)), bytes};
  }
}

StagingMemory::~StagingMemory() {
  if (memory_.begin == nullptr || !keep_) {
    return;
  }
  const std::lock_guard lock(mutex_of_kept());
  if (kept().bytes < memory_.bytes) {
    kept() = std::move(memory_);
  }
}

int64_t StagingMemory::taken_by(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

at::Tensor StagingMemory::place_for(const at::Tensor& elements) {
  const int64_t bytes = taken_by(static_cast<int64_t>(elements.nbytes()));
  FSDP_CHECK(used_ + bytes <= bytes_, "[stage] {} bytes are too many after {} of {}", bytes, used_, bytes_);
  const int64_t begin = taken_by(static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory_.begin.get())));
  auto place = at::from_blob(
      reinterpret_cast<void*>(static_cast<uintptr_t>(begin + used_)), // NOLINT: within the memory
      elements.sizes(),
      at::TensorOptions(elements.scalar_type()));
  used_ += bytes;
  return place;
}

} // namespace fsdp::disk
