#include "comm/shm/core.h"

#include <exception>
#include <utility>

#include "base/caller.h"
#include "base/check.h"

namespace fsdp::shm {
namespace {

class QueuedWork final : public Work {
 public:
  QueuedWork(CorePointer core, Collectives::StepPointer last_step, Collectives::Lent lent)
      : core_(std::move(core)), last_step_(std::move(last_step)), lent_(std::move(lent)) {}
  ~QueuedWork() override {
    core_->collectives.keep(last_step_->number, std::move(lent_));
  }

  bool done() override {
    if (core_->members->failed()) {
      return true; // `wait` would not block: it throws, or nothing is left to wait for
    }
    if (!last_step_->done) {
      core_->members->errands().advance(&core_->collectives); // all groups': who only asks must not hold up others
    }
    core_->collectives.release_kept();
    return last_step_->done && (lent_.empty() || core_->collectives.all_finished(last_step_->number));
  }
  void wait() override {
    core_->collectives.finish(last_step_);
    if (!lent_.empty()) {
      core_->collectives.await_all_finished(*last_step_);
      lent_ = {};
    }
    core_->collectives.release_kept();
  }

 private:
  CorePointer core_;
  Collectives::StepPointer last_step_;
  Collectives::Lent lent_;
};

} // namespace

void agree(const std::vector<std::string>& complaints) {
  for (const std::string& complaint : complaints) {
    FSDP_CHECK(complaint.empty(), "{}", complaint);
  }
}

Core::Core(std::shared_ptr<Members> members_, Reach reach_)
    : members(std::move(members_)),
      reach(std::move(reach_)),
      collectives(*members),
      phases(*members, &RankSlot::writing, &RankSlot::published),
      unseen_writes(*members) {
  members->set_errand(&collectives);
  members->family()->add(members);
}

Core::~Core() {
  if (members->inherited()) {
    return;
  }
  const Label label{"leave", ""};
  const WithoutCallersLock no_callers_lock;
  try {
    collectives.advance();
    phases.publish_writes();
    unseen_writes.end();
    if (!members->failed()) {
      collectives.await_kept(0, label);
    }
  } catch (const std::exception&) { // the others will hear of it by themselves
    raise_interruption_later(std::current_exception());
  }
  if (members->failed() && members->one_process()) {
    members->await_readers();
  }
  members->set_errand(nullptr);
}

std::unique_ptr<Work> make_work(CorePointer core, Collectives::StepPointer last_step, Collectives::Lent lent) {
  return std::make_unique<QueuedWork>(std::move(core), std::move(last_step), std::move(lent));
}

} // namespace fsdp::shm
