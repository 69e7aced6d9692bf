#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "base/this_process.h"
#include "comm/process.h"
#include "comm/protocol/watched.h"
#include "comm/shm/segment.h"

/// In place of the system, for ranks that are fibers: segments in memory that is used again by the next run, at the
/// same addresses; processes; time. See [Note: watched code].

namespace fsdp::shm {
namespace {

struct Pooled {
  char* memory = nullptr;
  size_t bytes = 0;
};

// The first segments that a run makes; a run begins with the group's.
std::vector<Pooled>& pool() {
  static std::vector<Pooled> pool;
  return pool;
}
std::map<uint64_t, std::weak_ptr<Segment>>& opened() {
  static std::map<uint64_t, std::weak_ptr<Segment>> opened;
  return opened;
}
uint64_t next_in_pool = 0;

char* map(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
}

char* zeros(uint64_t index, size_t bytes) {
  constexpr size_t kSmall = 1 << 20;
  pool().resize(std::max<size_t>(pool().size(), index + 1));
  Pooled& pooled = pool()[index];
  if (pooled.bytes < bytes) {
    pooled = {map(bytes), bytes};
  } else if (bytes <= kSmall) {
    std::memset(pooled.memory, 0, bytes);
  } else {
    madvise(pooled.memory, bytes, MADV_DONTNEED);
  }
  return pooled.memory;
}

} // namespace

void Unmap::operator()(char*) const {}

std::shared_ptr<Segment> Segment::create(const char* name, size_t bytes, Access access) {
  const bool is_arena = std::string(name) == "fsdp-arena"; // of the process, for all runs
  next_in_pool = std::string(name) == "fsdp-group" ? 0 : next_in_pool;
  const uint64_t index = is_arena ? UINT64_MAX : next_in_pool++;
  char* memory = is_arena ? map(bytes) : zeros(index, bytes);
  std::shared_ptr<Segment> segment(new Segment({getpid(), 0, 0, index, bytes}, 0, access));
  segment->writable_ = Mapping(memory, Unmap{bytes});
  opened()[index] = segment;
  if (!is_arena) {
    testing::watched::add_region(memory, bytes);
  }
  return segment;
}

std::shared_ptr<Segment> Segment::open(const SegmentId& id, Access) {
  return opened().at(id.inode).lock();
}

Segment::Segment(const SegmentId& id, int, Access) : id_(id) {}
Segment::~Segment() = default;
void Segment::hide() {}
void Segment::punch(size_t, size_t) const {}

} // namespace fsdp::shm

namespace fsdp {
namespace {
constexpr int kFirstProcess = 1'000'000;
} // namespace

std::optional<uint64_t> process_start(int32_t) {
  return 1;
}
std::optional<int32_t> giver_of(const std::vector<std::string>&) {
  return std::nullopt;
}
bool has_ended(int32_t pid, uint64_t) {
  return testing::watched::sees_end_of(pid - kFirstProcess);
}
std::string host_identity() {
  return "explored";
}
std::string process_space() {
  return "explored";
}
int looks_before_sleep(int) {
  return 1; // the others take no step meanwhile
}
std::shared_ptr<const WatchedProcess> WatchedProcess::of(int32_t pid, uint64_t started) {
  return std::make_shared<const WatchedProcess>(pid, started);
}
WatchedProcess::WatchedProcess(int32_t pid, uint64_t started) : pid_(pid), started_(started), descriptor_(-1) {}
WatchedProcess::~WatchedProcess() = default;
bool WatchedProcess::ended() const {
  return descriptor_ < 0 && has_ended(pid_, started_);
}

pid_t this_process() {
  return getpid(); // each fiber's
}

} // namespace fsdp

// With ld's --wrap.
extern "C" {
pid_t __real_getpid();
pid_t __wrap_getpid() {
  const int rank = fsdp::testing::watched::rank();
  return rank < 0 ? __real_getpid() : fsdp::kFirstProcess + rank;
}
int __real_sched_yield();
int __wrap_sched_yield() {
  return fsdp::testing::watched::rank() < 0 ? __real_sched_yield() : (fsdp::testing::watched::nap(), 0);
}
int __real_nanosleep(const timespec* time, timespec* rest);
int __wrap_nanosleep(const timespec* time, timespec* rest) {
  return fsdp::testing::watched::rank() < 0 ? __real_nanosleep(time, rest) : (fsdp::testing::watched::nap(), 0);
}
}
