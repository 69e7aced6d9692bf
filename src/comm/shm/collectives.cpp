#include "comm/shm/collectives.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/phrase.h"
#include "comm/words.h"

namespace fsdp::shm {

Post& Collectives::prepare(const Label& label, const Fingerprint& fingerprint) {
  members_.begin(label);
  release_kept();
  label_ = label;
  fingerprint_ = fingerprint.value();
  await_room(label);
  return members_.mine().posts[(last_ + 1) % RankSlot::kPosts];
}

// A post may be overwritten only when nobody can want to read it any more. Enough for the longest collective, of three
// steps.
void Collectives::await_room(const Label& label) {
  constexpr uint64_t kLongest = 3;
  const uint64_t needed = last_ + kLongest;
  if (needed <= room_until_) {
    return;
  }
  const uint64_t overwritten = needed - RankSlot::kPosts;
  const auto mine_finished = [this] { return members_.mine().finished.load(std::memory_order_relaxed); };
  while (mine_finished() < overwritten) {
    finish_first(label);
  }
  members_.await_all(&RankSlot::finished, overwritten, label);
  room_until_ = needed;
}

uint64_t Collectives::commit(int steps) {
  const uint64_t first = last_ + 1;
  history_ = std::exchange(next_history_, Fingerprint::appended(next_history_, fingerprint_));
  for (int i = 0; i < steps; ++i) {
    Post& post = members_.mine().posts[++last_ % RankSlot::kPosts];
    post.fingerprint = fingerprint_;
    post.history = history_;
    post.label.store(label_);
  }
  members_.publish(members_.mine().posted, last_);
  return first;
}

Collectives::StepPointer Collectives::queue(Part part) {
  auto step = std::make_shared<Step>(std::move(part), label_, fingerprint_, history_);
  const std::scoped_lock lock(members_.errands().mutex());
  queue_.push_back(step);
  return step;
}

bool Collectives::advance() {
  Leftovers leftovers; // go after the lock
  const std::scoped_lock lock(members_.errands().mutex());
  return advance(leftovers);
}

bool Collectives::advance(Leftovers& leftovers) {
  bool advanced = false;
  try {
    for (; !queue_.empty() && arrived(*queue_.front()); advanced = true) {
      run_front(leftovers);
    }
  } catch (const std::exception& error) {
    members_.mark_failed(error.what());
    throw;
  }
  return advanced;
}

void Collectives::run_front(Leftovers& leftovers) {
  const StepPointer step = queue_.front();
  step->run();
  leftovers.push_back(std::exchange(step->run, nullptr));
  queue_.pop_front();
  members_.publish(members_.mine().finished, step->number);
  step->done = true;
}

bool Collectives::arrived(Step& step) {
  for (; step.arrived < members_.size(); ++step.arrived) {
    const int rank = step.arrived;
    if (rank == members_.rank() || !step.depends_on(rank)) {
      continue;
    }
    if (!step.reached(members_.slot(rank))) {
      return false;
    }
    check_order(step, rank);
  }
  return true;
}

void Collectives::check_order(const Step& step, int rank) const {
  const Post& other = post_of(rank, step.number);
  const bool alike = other.fingerprint == step.fingerprint && other.history == step.history;
  if (members_.slot(rank).posted.load() < step.number || alike) {
    return;
  }
  const std::string mine = describe(step.label);
  const std::string theirs = describe(other.label.operation.load(), other.label.unit.load());
  const auto me = phrase("rank {}", members_.rank()), they = phrase("rank {}", rank);
  if (other.fingerprint == step.fingerprint) {
    members_.fail(
        step.label,
        phrase(
            "{} and {} both call {}, but did not agree in what they called before it: broadcasts from different ranks, "
            "perhaps; all ranks must name the same one",
            me,
            they,
            mine));
  }
  members_.fail(
      step.label,
      mine == theirs ? phrase(
                           "{} and {} both call {}, but with different sizes, dtypes or arguments; they must agree",
                           me,
                           they,
                           mine)
                     : phrase("{} calls {} where {} calls {}", me, mine, they, theirs) +
                           "; all ranks must call the same operations in the same order");
}

void Collectives::finish(const StepPointer& step) {
  try {
    while (!step->done) {
      members_.throw_if_failed(step->label);
      await_front(step->label);
    }
  } catch (const std::exception& error) {
    abandon(error.what());
    throw;
  }
}

// Nothing runs any more: a step may refer to what goes with the exception.
void Collectives::abandon(const std::string& reason) {
  if (members_.inherited()) {
    return; // a thread of the parent may have held the lock
  }
  members_.mark_failed(reason);
  std::deque<StepPointer> steps; // go after the lock
  const std::scoped_lock lock(members_.errands().mutex());
  steps.swap(queue_);
}

void Collectives::finish_first(const Label& label) {
  members_.throw_if_failed(label);
  if (const StepPointer first = front()) {
    finish(first);
  }
}

Collectives::StepPointer Collectives::front() const {
  const std::scoped_lock lock(members_.errands().mutex());
  return queue_.empty() ? nullptr : queue_.front();
}

void Collectives::await_front(const Label& label) {
  const StepPointer step = advance() ? nullptr : front();
  if (step) {
    const int peer = std::min(step->arrived.load(), members_.size() - 1);
    members_.await(peer, label, [&](int r) { return !step->depends_on(r) || step->reached(members_.slot(r)); });
  }
}

void Collectives::keep(uint64_t number, Lent lent) {
  if (!lent.empty() && !members_.inherited()) { // a thread of the parent may have held the lock
    const std::scoped_lock lock(kept_mutex_);
    kept_.push_back({number, std::move(lent)});
  }
}

bool Collectives::all_finished(uint64_t number) const {
  for (int r = 0; r < members_.size(); ++r) {
    if (members_.slot(r).finished.load(std::memory_order_acquire) < number) {
      return false;
    }
  }
  return true;
}

void Collectives::release_kept() {
  std::vector<Kept> unread; // go after the lock
  const std::scoped_lock lock(kept_mutex_);
  while (!kept_.empty() && all_finished(kept_.front().number)) {
    unread.push_back(std::move(kept_.front()));
    kept_.pop_front();
  }
}

std::optional<uint64_t> Collectives::oldest_kept(size_t beyond) {
  const std::scoped_lock lock(kept_mutex_);
  return kept_.size() > beyond ? std::optional(kept_.front().number) : std::nullopt;
}

void Collectives::await_kept(size_t limit, const Label& label) {
  members_.throw_if_failed(label); // also in a forked child, of which these are not
  while (const auto number = oldest_kept(limit)) {
    while (members_.mine().finished.load(std::memory_order_relaxed) < *number) {
      finish_first(label);
    }
    members_.await_all(&RankSlot::finished, *number, label);
    release_kept();
  }
}

void Collectives::await_all_finished(const Step& step) {
  members_.throw_if_failed(step.label); // also in a forked child, which must not look at the others
  members_.await_all(&RankSlot::finished, step.number, step.label);
}

} // namespace fsdp::shm
