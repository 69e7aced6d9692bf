#pragma once

#include <atomic>
#include <csignal>
#include <cstddef>

#include <sys/mman.h>

namespace fsdp::testing {

/// Memory whose first write pauses the thread that writes, in the midst of what it does, until another thread lets it
/// go on. One at a time.
class PausedMemory {
 public:
  explicit PausedMemory(size_t bytes)
      : bytes_(bytes), memory_(mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    current() = this;
    struct sigaction action {};
    action.sa_sigaction = &PausedMemory::on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &before_);
  }
  ~PausedMemory() {
    sigaction(SIGSEGV, &before_, nullptr);
    current() = nullptr;
    munmap(memory_, bytes_);
  }
  PausedMemory(const PausedMemory&) = delete;
  PausedMemory& operator=(const PausedMemory&) = delete;

  void* data() const {
    return memory_;
  }
  void await_writer() const {
    paused_.wait(false);
  }
  void go_on() {
    let_go_.store(true);
  }

 private:
  static std::atomic<PausedMemory*>& current() {
    static std::atomic<PausedMemory*> memory{nullptr};
    return memory;
  }

  static void on_fault(int signal, siginfo_t* info, void*) {
    PausedMemory* memory = current().load();
    const auto* address = static_cast<const char*>(info->si_addr);
    const auto* begin = memory ? static_cast<const char*>(memory->memory_) : nullptr;
    if (!memory || address < begin || address >= begin + memory->bytes_) {
      std::signal(signal, SIG_DFL); // another mistake: it happens again
      return;
    }
    memory->paused_.store(true);
    memory->paused_.notify_all();
    while (!memory->let_go_.load()) {
    }
    mprotect(memory->memory_, memory->bytes_, PROT_READ | PROT_WRITE);
  }

  size_t bytes_;
  void* memory_;
  struct sigaction before_ {};
  std::atomic<bool> paused_ = false;
  std::atomic<bool> let_go_ = false;
};

} // namespace fsdp::testing
