#include <algorithm>
#include <random>
#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include <fsdp/error.h>

#include <fsdp/group.h>
#include "comm/shm/arena.h"
#include "comm/shm/packed.h"
#include "comm/shm/segment.h"
#include "comm/shm/whole.h"

namespace fsdp {
namespace {

using shm::Access;
using shm::Arena;
using shm::kPage;
using shm::packed;
using shm::Segment;
using shm::SegmentId;
using shm::unpacked;

std::string random_text() {
  std::random_device random;
  return std::to_string(random()) + "-" + std::to_string(random()) + "-" + std::to_string(random());
}

// For the arenas of all ranks, and as much as one for whatever else the program does: limits on addresses (ulimit -v)
// may leave less.
bool have_room(size_t ranks) {
  const size_t bytes = (ranks + 1) * Arena::wanted_bytes();
  void* const room = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return room != MAP_FAILED && munmap(room, bytes) == 0;
}

// In a child of what was a rank there is none: what it has of its parent is in memory that others know as the parent's.
bool have_own_arena() {
  try {
    return Arena::of_process().id().pid == getpid();
  } catch (const Error&) {
    return false;
  }
}

// A segment with a random text in it, or nothing where there are no memfds.
std::shared_ptr<Segment> show(const std::string& text) {
  try {
    auto segment = Segment::create("fsdp-probe", kPage, Access::kWrite);
    text.copy(segment->writable(), kPage - 1);
    return segment;
  } catch (const Error&) {
    return nullptr;
  }
}

// `shown` is a segment's identity and the text that must be found in it. Process numbers alone prove nothing: other
// hosts and namespaces use the same ones.
bool sees(const std::string& shown) {
  if (shown.size() <= sizeof(SegmentId)) {
    return false;
  }
  try {
    const auto segment = Segment::open(unpacked<SegmentId>(shown.substr(0, sizeof(SegmentId))), Access::kRead);
    return segment->readable() == shown.substr(sizeof(SegmentId));
  } catch (const Error&) {
    return false;
  }
}

} // namespace

bool shm_available(const Exchange& exchange) {
  const std::string text = random_text();
  const auto mine = show(text);
  const std::string own = mine ? packed(mine->id()) + text : "";
  const auto shown = exchange(own);
  // A group for dry runs has no other ranks: each gets its own words back.
  const bool others_answer = std::count(shown.begin(), shown.end(), own) == 1;
  const bool all_seen = others_answer && std::all_of(shown.begin(), shown.end(), sees);
  const auto answers = exchange(all_seen && have_room(shown.size()) && have_own_arena() ? "yes" : "no");
  return std::all_of(answers.begin(), answers.end(), [](const std::string& answer) { return answer == "yes"; });
}

} // namespace fsdp
