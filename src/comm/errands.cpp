#include "comm/errands.h"

#include <algorithm>
#include <exception>

#include <unistd.h>

namespace fsdp {
namespace {

/// A forked child has none of its parent's, whose groups may be gone there.
class OfThisProcess {
 public:
  std::shared_ptr<Errands> get() {
    if (process_ != getpid()) {
      *this = {};
    }
    return errands_;
  }

 private:
  pid_t process_ = getpid();
  std::shared_ptr<Errands> errands_ = std::make_shared<Errands>();
};

} // namespace

std::shared_ptr<Errands> Errands::of_rank(bool is_thread) {
  if (is_thread) {
    thread_local OfThisProcess of_thread;
    return of_thread.get();
  }
  static auto* const of_process = new OfThisProcess; // for groups that live until exit
  return of_process->get();
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
