#include "comm/protocol/exploration.h"

#include <sstream>

namespace fsdp::testing {

using watched::Kind;

void Explorer::violate(const std::string& what) {
  inside = true;
  if (result_.violation.empty()) {
    result_.violation = what + trace();
  }
  std::longjmp(outside_, 1); // what the ranks' stacks hold is lost
}

std::string Explorer::describe(const Trace& step) const {
  std::string who = "rank " + std::to_string(step.rank);
  if (step.kill) {
    return who + " dies";
  }
  if (step.address == nullptr) {
    return who + " goes on";
  }
  const std::string what = step.kind == Kind::kRead ? " reads " : " writes ";
  const auto* at = static_cast<const char*>(step.address);
  if (is_of_dead(at)) {
    return who + " looks whether rank " + std::to_string(reinterpret_cast<const uint8_t*>(at) - dead.data()) + " lives";
  }
  if (!regions_.empty() && at >= control_.base && at < control_.base + regions_[0].bytes) {
    const auto found = control_.find(at);
    return who + what +
           (found.rank < 0 ? found.offset == 0 ? "the failure" : "the reason"
                           : name_of(found.offset) + " of rank " + std::to_string(found.rank));
  }
  for (size_t i = 1; i < regions_.size(); ++i) {
    if (at >= regions_[i].begin && at < regions_[i].begin + regions_[i].bytes) {
      return who + what + "segment " + std::to_string(i) + " at " + std::to_string(at - regions_[i].begin);
    }
  }
  return who + what + "elsewhere";
}

std::string Explorer::trace() const {
  std::ostringstream out;
  out << "\nafter these steps:";
  for (const Trace& step : trace_) {
    out << "\n  " << describe(step);
  }
  out << "\nwhile";
  for (const auto& fiber : fibers_) {
    const bool asleep = fiber->status == Fiber::Status::kAsleep;
    out << "\n  " << describe({fiber->rank, fiber->pending, fiber->pending_kind, false})
        << (fiber->status == Fiber::Status::kDone   ? " and has ended"
            : fiber->status == Fiber::Status::kDead ? " and is dead"
            : asleep                                ? " and sleeps"
                                                    : "");
  }
  return out.str();
}

} // namespace fsdp::testing
