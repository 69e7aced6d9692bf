#include "comm/protocol/exploration.h"

namespace fsdp::testing {

std::vector<std::string> Explorer::exchange(const std::string& mine) {
  words_[static_cast<size_t>(current_)] = mine;
  meet();
  return all_words_;
}

void Explorer::meet() {
  if (++met_ < options_.ranks) {
    self().status = Fiber::Status::kMeeting;
    yield();
    return;
  }
  met_ = 0;
  all_words_ = words_;
  for (const auto& fiber : fibers_) {
    fiber->status = Fiber::Status::kReady;
  }
  if (std::exchange(starting_, false)) {
    mode_ = Mode::kExploring;
    for (const auto& fiber : fibers_) {
      fiber->history = fiber->after_store = 0;
      fiber->pending = nullptr;
    }
  }
}

void Explorer::start() {
  starting_ = true;
  meet();
  if (mode_ == Mode::kExploring && !std::exchange(started_, true)) { // the others have waited
    yield();
  }
}

void Explorer::operation(bool on_its_way) {
  Fiber& fiber = self();
  fiber.history = fiber.after_store = mix(on_its_way ? fiber.history : 0, ++fiber.operations);
  fiber.looked_at.clear();
  fiber.keeps_all = on_its_way;
  fiber.awaits = fiber.spins = fiber.roused = fiber.posts = false;
  fiber.bell = nullptr;
}

Explored explore(const ExplorerOptions& options, const std::function<void()>& program) {
  return Explorer(options, program).explore();
}

namespace exploring {

int rank() {
  return active->self().rank;
}
int ranks() {
  return active->ranks();
}
std::vector<std::string> exchange(const std::string& mine) {
  const Inside guard;
  return active->exchange(mine);
}
void start() {
  const Inside guard;
  active->start();
}
void operation(bool on_its_way) {
  const Inside guard;
  active->operation(on_its_way);
}
void pause() {
  const Inside guard;
  active->pause();
}
void violate(const std::string& what) {
  const Inside guard;
  active->violate(what);
}

} // namespace exploring

} // namespace fsdp::testing
