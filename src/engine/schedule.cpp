#include "engine/schedule.h"

#include <algorithm>

namespace fsdp::engine {

void Schedule::touched(Touch touch) {
  if (repeats_ && recorded_.size() > 1 && recorded_.front() == touch) {
    end_step();
  }
  const bool as_expected = following_ && next_ < expected_.size() && expected_[next_] == touch;
  following_ = as_expected || resume_at(touch);
  if (as_expected) {
    ++next_;
  }
  if (recorded_.size() <= kLongest) {
    recorded_.push_back(touch);
  }
}

// Finds the place where the last two touches follow one another: a repeated forward, or the way back after a detour.
bool Schedule::resume_at(Touch touch) {
  const Touch* last = recorded_.empty() ? nullptr : &recorded_.back();
  for (size_t i = 0; i < expected_.size(); ++i) {
    const bool after_last = last != nullptr && i > 0 && expected_[i - 1] == *last;
    if (expected_[i] == touch && (after_last || (i == 0 && touch.phase == Phase::kForward))) {
      next_ = i + 1;
      return true;
    }
  }
  return false;
}

void Schedule::end_step() {
  if (!recorded_.empty() && recorded_.size() <= kLongest) {
    expected_ = std::move(recorded_);
  }
  abandon_step();
}

void Schedule::abandon_step() {
  recorded_.clear();
  next_ = 0;
  following_ = !expected_.empty();
}

std::vector<Schedule::Touch> Schedule::upcoming(size_t count) const {
  std::vector<Touch> touches;
  if (!following_) {
    return touches;
  }
  const int current = recorded_.empty() ? -1 : recorded_.back().unit;
  for (size_t i = next_; i < expected_.size() && touches.size() < count; ++i) {
    const Touch& touch = expected_[i];
    const bool known = std::any_of(touches.begin(), touches.end(), [&](const auto& t) { return t.unit == touch.unit; });
    if (touch.unit != current && !known) {
      touches.push_back(touch);
    }
  }
  return touches;
}

} // namespace fsdp::engine
