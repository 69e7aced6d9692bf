#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <vector>

namespace fsdp::shm {

/// An all-gather among threads. Thread safe.
class ThreadExchange {
 public:
  ThreadExchange(int size, std::chrono::milliseconds timeout);
  /// Throws CommError if a thread does not come in time or `leave` was called.
  std::vector<std::string> exchange(int rank, const std::string& mine);
  /// Lets the others fail.
  void leave(int rank);

 private:
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> arriving_;
  std::vector<std::string> complete_; // of the last full round
  size_t arrived_ = 0;
  uint64_t round_ = 0;
  int left_ = -1; // a rank that will not come any more
};

} // namespace fsdp::shm
