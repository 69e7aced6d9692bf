#include "checkpoint/late_copy.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <utility>
#include <vector>

#include <unistd.h>

#include <c10/core/StorageImpl.h>
#include <c10/core/impl/COW.h>

#include "checkpoint/stream_copy.h"

namespace fsdp::disk {

namespace {

/// False where LibTorch has no such hook (before 2.13), or the storage has another one. Stays until the next write.
template <typename Storage>
bool call_before_write(Storage& storage, void (*hook)(Storage*)) {
  if constexpr (requires { storage.set_materializer(hook); }) {
    if (!storage.has_materializer()) {
      storage.set_materializer(hook);
      return true;
    }
  }
  return false;
}

} // namespace

/// Made once, by whoever comes first. Not in a forked child: its values are its own, and a thread of its parent may
/// hold the mutex.
class LateCopy::Job {
 public:
  Job(const void* from, void* to, size_t bytes) : from_(from), to_(to), bytes_(bytes) {}

  void run() {
    once([this] { stream_copy(to_, from_, bytes_); });
  }
  void cancel() {
    once([] {});
  }

 private:
  template <typename Body>
  void once(const Body& body) {
    if (getpid() != process_) {
      return;
    }
    const std::lock_guard lock(mutex_);
    if (!std::exchange(is_done_, true)) {
      body();
    }
  }

  const pid_t process_ = getpid();
  std::mutex mutex_{};
  bool is_done_ = false;
  const void* from_;
  void* to_;
  size_t bytes_;
};

/// What a storage has, which lives until neither the storage nor a copy of it needs it: storages are resized.
class LateCopy::Memory {
 public:
  /// Null if the storage has none that it shares with copies.
  static std::shared_ptr<Memory> of(const c10::StorageImpl& storage) {
    const c10::DataPtr& data = storage.data_ptr();
    return data.get_deleter() == &let_go ? *static_cast<std::shared_ptr<Memory>*>(data.get_context()) : nullptr;
  }
  static std::shared_ptr<Memory> share(c10::StorageImpl& storage) {
    auto memory = std::make_shared<Memory>();
    c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
    void* address = data.get();
    const c10::Device device = data.device();
    auto owner = std::make_unique<std::shared_ptr<Memory>>(memory);
    memory->data_ = std::move(data);
    storage.set_data_ptr_noswap({address, owner.release(), &let_go, device});
    return memory;
  }

  void add(const std::shared_ptr<Job>& job) {
    const std::lock_guard lock(mutex_);
    std::erase_if(jobs_, [](const auto& each) { return each.expired(); });
    jobs_.push_back(job);
  }
  std::vector<std::weak_ptr<Job>> jobs() {
    const std::lock_guard lock(mutex_);
    return jobs_;
  }

  std::atomic<bool> has_hook = false; ///< the storage calls ours

 private:
  static void let_go(void* owner) {
    delete static_cast<std::shared_ptr<Memory>*>(owner);
  }

  c10::DataPtr data_{};
  std::mutex mutex_{};
  std::vector<std::weak_ptr<Job>> jobs_{};
};

std::unique_ptr<LateCopy> LateCopy::make(const at::Tensor& from, at::Tensor& to) {
  c10::StorageImpl& storage = *from.storage().unsafeGetStorageImpl();
  auto memory = Memory::of(storage);
  if (memory == nullptr && !c10::impl::cow::has_simple_data_ptr(storage)) {
    return nullptr;
  }
  const bool is_new = call_before_write(storage, &before_write);
  if (!is_new && (memory == nullptr || !memory->has_hook)) {
    return nullptr;
  }
  if (memory == nullptr) {
    memory = Memory::share(storage);
  }
  memory->has_hook = true;
  auto job = std::make_shared<Job>(from.const_data_ptr(), to.data_ptr(), from.nbytes());
  memory->add(job);
  return std::unique_ptr<LateCopy>(new LateCopy(std::move(memory), std::move(job)));
}

LateCopy::LateCopy(std::shared_ptr<Memory> memory, std::shared_ptr<Job> job)
    : memory_(std::move(memory)), job_(std::move(job)) {}

LateCopy::~LateCopy() {
  job_->cancel();
}

void LateCopy::finish() {
  job_->run();
}

void LateCopy::before_write(c10::StorageImpl* storage) {
  if (const auto memory = Memory::of(*storage)) { // else it was resized since
    memory->has_hook = false; // as soon as this returns
    for (const auto& each : memory->jobs()) {
      if (const auto job = each.lock()) {
        job->run();
      }
    }
  }
}

} // namespace fsdp::disk
