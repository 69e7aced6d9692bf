#include "comm/protocol/exploration.h"

#include <cstring>

namespace fsdp::testing {

using shm::Control;
using watched::Kind;

Explored Explorer::explore() {
  active = this;
  do {
    learned_ = false;
    seen_.clear();
    path_.clear();
    do {
      run_once();
    } while (result_.violation.empty() && !learned_ && next_path());
  } while (result_.violation.empty() && learned_);
  active = nullptr;
  result_.states = static_cast<int64_t>(seen_.size());
  return result_;
}

bool Explorer::next_path() {
  while (!path_.empty() && ++path_.back().index >= path_.back().moves.size()) {
    path_.pop_back();
  }
  return !path_.empty();
}

bool Explorer::can_wake(const Fiber& fiber) const {
  return fiber.status == Fiber::Status::kAsleep && fiber.rung();
}

std::vector<int> Explorer::moves() {
  std::vector<int> result, nappers;
  const bool somebody_died = options_.mortal >= 0 && dead[static_cast<size_t>(options_.mortal)];
  for (const auto& fiber : fibers_) {
    const bool asleep = fiber->status == Fiber::Status::kAsleep;
    const bool naps = asleep && (!fiber->napped || fiber->polls);
    if (fiber->status == Fiber::Status::kReady || can_wake(*fiber) ||
        (asleep && !fiber->napped && (somebody_died || fiber->polls))) {
      result.push_back(fiber->rank);
    } else if (naps) {
      nappers.push_back(fiber->rank);
    }
  }
  if (result.empty() && options_.may_fail) {
    result = nappers;
  }
  if (options_.mortal >= 0 && !somebody_died) {
    const auto status = fibers_[static_cast<size_t>(options_.mortal)]->status;
    if (status == Fiber::Status::kReady || status == Fiber::Status::kAsleep) {
      result.push_back(kKill + options_.mortal);
    }
  }
  return result;
}

int Explorer::next() {
  while (mode_ == Mode::kExploring) {
    const std::vector<int> possible = moves();
    if (possible.empty()) {
      for (const auto& fiber : fibers_) {
        if (fiber->status == Fiber::Status::kAsleep) {
          violate("nobody can go on");
        }
      }
      mode_ = Mode::kDraining;
      break;
    }
    const int move = choose(possible);
    if (move < 0) {
      break;
    }
    if (move >= kKill) {
      Fiber& fiber = *fibers_[static_cast<size_t>(move - kKill)];
      trace_.push_back({fiber.rank, nullptr, Kind::kWrite, true});
      dead[static_cast<size_t>(fiber.rank)] = 1;
      fiber.end(Fiber::Status::kDead);
      something_happened();
      continue;
    }
    Fiber& fiber = *fibers_[static_cast<size_t>(move)];
    if (fiber.status == Fiber::Status::kAsleep && !fiber.rung()) {
      fiber.spins = fiber.polls && fiber.napped; // time goes by
      fiber.napped = true;
    }
    trace_.push_back({move, fiber.pending, fiber.pending_kind, false});
    return move;
  }
  return next_without_choice();
}

int Explorer::choose(const std::vector<int>& moves) {
  if (moves.size() == 1) {
    return moves[0];
  }
  if (depth_ < path_.size()) {
    Choice& choice = path_[depth_++];
    if (choice.moves != moves) {
      violate("the same steps led to another state: the program is not deterministic");
    }
    return choice.moves[choice.index];
  }
  const auto [known, is_new] = seen_.emplace(state(), pending_steps());
  if (!is_new) {
    if (known->second != pending_steps()) {
      violate("a rank remembers more than what it read in its operation");
    }
    mode_ = Mode::kDraining;
    return -1;
  }
  path_.push_back({moves, 0});
  ++depth_;
  return moves[0];
}

// Before exploring begins, and after a state that was seen before: to the end, in some order.
int Explorer::next_without_choice() {
  for (const bool asleep : {false, true}) {
    for (const auto& fiber : fibers_) {
      const bool naps = mode_ == Mode::kDraining && asleep && fiber->status == Fiber::Status::kAsleep &&
                        (!fiber->napped || fiber->polls);
      if (fiber->status == Fiber::Status::kReady || can_wake(*fiber) || naps) {
        fiber->spins = naps && fiber->napped;
        fiber->napped = naps;
        return fiber->rank;
      }
    }
  }
  if (mode_ == Mode::kSettingUp) {
    violate("nobody can go on before the exploration begins");
  }
  for (const auto& fiber : fibers_) {
    if (fiber->status == Fiber::Status::kDead) { // so that its memory is given back: the others have gone
      fiber->status = Fiber::Status::kReady;
      return fiber->rank;
    }
  }
  return -1;
}

void Explorer::something_happened() {
  for (const auto& fiber : fibers_) {
    fiber->napped = false;
  }
}

namespace {
uint64_t value_at(const void* address, size_t bytes) {
  uint64_t value = 0;
  std::memcpy(&value, address, bytes);
  return value;
}
} // namespace

uint64_t Explorer::state() const {
  uint64_t hash = 1;
  for (const void* address : contended_) {
    hash = mix(hash, value_at(address, cells_.at(address).bytes));
  }
  for (const auto& fiber : fibers_) {
    hash = mix(hash, fiber->history);
    hash = mix(hash, static_cast<uint64_t>(fiber->status) * 8 + (fiber->rung() ? 4 : 0) + (fiber->napped ? 2 : 0));
    const auto* control = reinterpret_cast<const Control*>(control_.base);
    hash = mix(hash, static_cast<uint64_t>(control->ranks[fiber->rank].wakes_for.load()));
  }
  return hash;
}

uint64_t Explorer::pending_steps() const {
  uint64_t hash = 1;
  for (const auto& fiber : fibers_) {
    hash = mix(mix(hash, fiber->pending), static_cast<uint64_t>(fiber->pending_kind));
  }
  return hash;
}

} // namespace fsdp::testing
