#include "comm/shm/core.h"

#include <exception>
#include <utility>

#include "base/check.h"

namespace fsdp::shm {

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
  try {
    collectives.advance();
    phases.publish_writes();
    unseen_writes.end();
    if (!members->failed()) {
      collectives.await_kept(0, label);
    }
  } catch (const std::exception&) { // the others will hear of it by themselves
  }
  if (members->failed() && members->one_process()) {
    members->await_readers();
  }
  members->set_errand(nullptr);
}

} // namespace fsdp::shm
