#include "comm/shm/thread_exchange.h"

#include <fsdp/error.h>

namespace fsdp::shm {

ThreadExchange::ThreadExchange(int size, std::chrono::milliseconds timeout)
    : timeout_(timeout), arriving_(static_cast<size_t>(size)) {}

std::vector<std::string> ThreadExchange::exchange(int rank, const std::string& mine) {
  std::unique_lock lock(mutex_);
  arriving_[static_cast<size_t>(rank)] = mine;
  const uint64_t round = round_;
  if (++arrived_ == arriving_.size()) {
    complete_ = arriving_;
    arrived_ = 0;
    ++round_;
    changed_.notify_all();
  }
  const bool came = changed_.wait_for(lock, timeout_, [&] { return round_ != round || left_ >= 0; });
  if (round_ == round) {
    throw CommError(
        "[join thread group] rank " + std::to_string(rank) +
        (came ? " was left alone by rank " + std::to_string(left_)
              : std::string(" waited in vain for the other threads")));
  }
  return complete_;
}

void ThreadExchange::leave(int rank) {
  std::lock_guard lock(mutex_);
  left_ = rank;
  changed_.notify_all();
}

} // namespace fsdp::shm
