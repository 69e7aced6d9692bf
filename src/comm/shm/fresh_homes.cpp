#include "comm/shm/fresh_homes.h"

#include <algorithm>

namespace fsdp::shm {

void FreshHomes::add(State& home) {
  home.fresh = true;
  homes_.push_back(&home);
}

void FreshHomes::remove(State& home) {
  if (home.fresh) {
    homes_.erase(std::find(homes_.begin(), homes_.end(), &home));
    home.fresh = false;
  }
}

void FreshHomes::publish_one(State& home) {
  home.needed = round_;
  members_.publish(home.published[members_.rank()].value, round_);
}

void FreshHomes::gathered(State& home) {
  if (home.fresh) {
    publish_one(home);
    remove(home);
    was_gathered_ = true;
  }
}

void FreshHomes::await_readable(State& home, const Label& label) const {
  if (home.needed > 0) {
    members_.await_all(label, [&](int r) { return home.published[r].value.load() >= home.needed; });
  }
  home.needed = 0;
}

void FreshHomes::publish() {
  for (State* home : homes_) {
    publish_one(*home);
  }
}

void FreshHomes::resume(bool any_read_fresh) {
  ++round_;
  was_gathered_ = false;
  if (any_read_fresh) {
    while (!homes_.empty()) {
      remove(*homes_.back());
    }
  }
}

} // namespace fsdp::shm
