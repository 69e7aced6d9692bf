#include "comm/shm/collectives.h"

#include <exception>
#include <string>
#include <utility>

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
  for (int i = 0; i < steps; ++i) {
    Post& post = members_.mine().posts[++last_ % RankSlot::kPosts];
    post.fingerprint = fingerprint_;
    post.label.store(label_);
  }
  members_.publish(members_.mine().posted, last_);
  return first;
}

Collectives::StepPointer Collectives::queue(Part part) {
  queue_.push_back(std::make_shared<Step>(Step{std::move(part), label_, fingerprint_}));
  return queue_.back();
}

bool Collectives::advance() {
  bool advanced = false;
  while (!queue_.empty() && arrived(*queue_.front())) {
    const StepPointer step = queue_.front();
    step->part.run();
    step->part.run = nullptr; // frees what it holds
    step->done = true;
    queue_.pop_front();
    members_.publish(members_.mine().finished, step->part.number);
    advanced = true;
  }
  return advanced;
}

bool Collectives::arrived(Step& step) {
  for (; step.arrived < members_.size(); ++step.arrived) {
    const int rank = step.arrived;
    if (rank == members_.rank() || (step.part.root >= 0 && rank != step.part.root)) {
      continue;
    }
    if ((members_.slot(rank).*step.part.counter).load() < step.part.value) {
      return false;
    }
    check_order(step, rank);
  }
  return true;
}

void Collectives::check_order(const Step& step, int rank) const {
  const Post& other = post_of(rank, step.part.number);
  if (members_.slot(rank).posted.load() < step.part.number || other.fingerprint == step.fingerprint) {
    return;
  }
  const std::string mine = describe(step.label.operation, step.label.unit);
  const std::string theirs = describe(other.label.operation.load(), other.label.unit.load());
  const std::string me = "rank " + std::to_string(members_.rank());
  const std::string they = "rank " + std::to_string(rank);
  if (mine == theirs) {
    members_.fail(
        step.label,
        me + " and " + they + " both call " + mine +
            ", but with different sizes, dtypes or arguments; they must agree");
  }
  members_.fail(
      step.label,
      me + " calls " + mine + " where " + they + " calls " + theirs +
          "; all ranks must call the same operations in the same order");
}

void Collectives::finish(const StepPointer& step) {
  try {
    while (!step->done) {
      members_.throw_if_failed(step->label);
      await_front(step->label);
    }
  } catch (const std::exception& error) {
    members_.mark_failed(error.what());
    queue_.clear(); // a step may refer to what goes with this exception
    throw;
  }
}

void Collectives::finish_first(const Label& label) {
  members_.throw_if_failed(label);
  const StepPointer first = queue_.front(); // a copy: it leaves the queue on the way
  finish(first);
}

void Collectives::await_front(const Label& label) {
  if (advance()) {
    return;
  }
  const Step& front = *queue_.front();
  const auto counter = front.part.counter;
  const uint64_t value = front.part.value;
  const int peer = front.arrived;
  members_.await(peer, label, [&] { return (members_.slot(peer).*counter).load() >= value; });
}

void Collectives::keep(uint64_t number, std::vector<at::Tensor> tensors, std::shared_ptr<char> block) {
  if (!tensors.empty() || block) {
    kept_.push_back({number, std::move(tensors), std::move(block)});
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
  while (!kept_.empty() && all_finished(kept_.front().number)) {
    kept_.pop_front();
  }
}

void Collectives::await_kept(size_t limit, const Label& label) {
  while (kept_.size() > limit) {
    const uint64_t number = kept_.front().number;
    while (members_.mine().finished.load(std::memory_order_relaxed) < number) {
      finish_first(label);
    }
    members_.await_all(&RankSlot::finished, number, label);
    release_kept();
  }
}

namespace {

class QueuedWork final : public Work {
 public:
  QueuedWork(std::shared_ptr<Collectives> collectives, Collectives::StepPointer last_step)
      : collectives_(std::move(collectives)), last_step_(std::move(last_step)) {}

  bool done() override {
    if (!last_step_->done) {
      collectives_->advance();
    }
    collectives_->release_kept();
    return last_step_->done || collectives_->members().failed(); // then `wait` throws at once
  }
  void wait() override {
    collectives_->finish(last_step_);
    collectives_->release_kept();
  }

 private:
  std::shared_ptr<Collectives> collectives_;
  Collectives::StepPointer last_step_;
};

} // namespace

std::unique_ptr<Work> make_work(std::shared_ptr<Collectives> collectives, Collectives::StepPointer last_step) {
  return std::make_unique<QueuedWork>(std::move(collectives), std::move(last_step));
}

} // namespace fsdp::shm
