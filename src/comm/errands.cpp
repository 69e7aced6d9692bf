#include "comm/errands.h"

#include <algorithm>
#include <exception>

#include <unistd.h>

namespace fsdp {
namespace {

struct OfProcess {
  pid_t process = getpid(); // a forked child has none of its parent's
  std::shared_ptr<Errands> errands = std::make_shared<Errands>();
};

} // namespace

std::shared_ptr<Errands> Errands::of_rank(bool is_thread) {
  if (is_thread) {
    thread_local const auto of_thread = std::make_shared<Errands>();
    return of_thread;
  }
  static auto* of_process = new OfProcess; // for groups that live until exit
  if (of_process->process != getpid()) {
    of_process = new OfProcess;
  }
  return of_process->errands;
}

void Errands::add(Errand& errand) {
  ++in_process_;
  const std::scoped_lock lock(mutex_);
  all_.push_back(&errand);
}

void Errands::remove(Errand& errand) {
  --in_process_;
  const std::scoped_lock lock(mutex_);
  all_.erase(std::remove(all_.begin(), all_.end(), &errand), all_.end());
}

bool Errands::pending(const Errand* own) const {
  const std::scoped_lock lock(mutex_);
  return own && own->pending();
}

bool Errands::others_pending(const Errand* own) const {
  const std::scoped_lock lock(mutex_);
  return std::any_of(
      all_.begin(), all_.end(), [&](const Errand* errand) { return errand != own && errand->pending(); });
}

bool Errands::advance(const Errand* own) {
  Errand::Leftovers leftovers; // go after the lock
  const std::scoped_lock lock(mutex_);
  bool advanced = false;
  for (Errand* errand : all_) {
    try {
      advanced = (errand->pending() && errand->advance(leftovers)) || advanced;
    } catch (const std::exception&) {
      if (errand == own) {
        throw;
      }
    }
  }
  return advanced;
}

bool Errands::advance_of_process() {
  bool left = false;
  for (const bool is_thread : {true, false}) {
    const auto errands = of_rank(is_thread);
    errands->advance(nullptr);
    left = errands->others_pending(nullptr) || left;
  }
  return left;
}

} // namespace fsdp
