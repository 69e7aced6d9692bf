#include <utility>

#include <unistd.h>

#include "comm/shm/arena.h"
#include "comm/shm/core.h"
#include "comm/shm/packed.h"

namespace fsdp::shm {
namespace {

// What a rank tells the others before they share any memory. Plain data.
struct Greeting {
  int32_t pid;
  SegmentId arena;
  SegmentId control; // of rank 0
};

std::vector<Greeting> greet(const Greeting& mine, const Exchange& exchange) {
  std::vector<Greeting> all;
  for (const std::string& bytes : exchange(packed(mine))) {
    all.push_back(unpacked<Greeting>(bytes));
  }
  return all;
}

// Of a rank that could not make one there is none to open: it says why itself.
std::vector<std::shared_ptr<Segment>> open_arenas(const std::vector<Greeting>& greetings) {
  std::vector<std::shared_ptr<Segment>> arenas;
  for (const Greeting& greeting : greetings) {
    const bool opens = greeting.pid != getpid() && greeting.arena.fd >= 0;
    arenas.push_back(opens ? Segment::open(greeting.arena, Access::kRead) : nullptr);
  }
  return arenas;
}

int processes(const std::vector<Greeting>& greetings) {
  int others = 0;
  for (const Greeting& greeting : greetings) {
    others += greeting.pid != getpid();
  }
  return others + 1;
}

} // namespace

CorePointer join(const Members::Place& place, const Exchange& exchange, bool arena) {
  std::shared_ptr<Segment> made;
  std::shared_ptr<Members> members;
  std::vector<std::shared_ptr<Segment>> arenas;
  Greeting mine{static_cast<int32_t>(getpid()), {}, {}};
  std::string complaint = complaint_of([&] {
    mine.arena = Arena::of_process().id();
    if (place.rank == 0) {
      made = Segment::create("fsdp-group", Control::bytes(place.size), Access::kWrite);
      mine.control = made->id();
    }
  });
  const std::vector<Greeting> greetings = greet(mine, exchange);
  if (complaint.empty()) {
    complaint = complaint_of([&] {
      members = std::make_shared<Members>(place, Segment::open(greetings[0].control, Access::kWrite));
      arenas = open_arenas(greetings);
      if (arena && processes(greetings) > 1) {
        Arena::of_process().offer_to_tensors(processes(greetings));
      }
    });
  }
  agree(exchange(complaint));
  if (made) {
    made->hide();
  }
  members->meet();
  Reach reach(*members, std::move(arenas));
  return std::make_shared<Core>(std::move(members), std::move(reach));
}

} // namespace fsdp::shm
