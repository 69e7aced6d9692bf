#include "comm/shm/segment.h"

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "base/format.h"

namespace fsdp::shm {
namespace {

// The segments mapped by this process, so that ranks that are threads share one mapping.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<uint64_t, uint64_t>, std::weak_ptr<Segment>> segments;
};

Registry& registry() {
  static auto* registry = new Registry; // outlives every segment
  return *registry;
}

std::pair<uint64_t, uint64_t> key(const SegmentId& id) {
  return {id.device, id.inode};
}

std::string reason() {
  return std::strerror(errno);
}

SegmentId identify(int fd, size_t bytes) {
  struct stat status {};
  FSDP_CHECK(fstat(fd, &status) == 0, "[shared memory] could not examine a segment: ", reason());
  return {static_cast<int32_t>(getpid()), fd, status.st_dev, status.st_ino, bytes};
}

Mapping map(int fd, size_t bytes, int protection) {
  void* memory = mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
  FSDP_CHECK(
      memory != MAP_FAILED,
      "[shared memory] could not map ",
      human_bytes(static_cast<int64_t>(bytes)),
      ": ",
      reason(),
      "; raise the limits on address space and mappings (ulimit -v, vm.max_map_count)");
  return {static_cast<char*>(memory), Unmap{bytes}};
}

// Closes a descriptor at the end of a scope.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) {
      close(fd);
    }
  }
  int release() {
    return std::exchange(fd, -1);
  }
};

} // namespace

void Unmap::operator()(char* memory) const {
  munmap(memory, bytes);
}

std::string SegmentId::packed() const {
  return {reinterpret_cast<const char*>(this), sizeof(*this)};
}

SegmentId SegmentId::unpacked(const std::string& bytes) {
  SegmentId id;
  FSDP_CHECK(bytes.size() == sizeof(id), "[shared memory] expected a segment's identity, got ", bytes.size(), " bytes");
  std::memcpy(&id, bytes.data(), sizeof(id));
  return id;
}

std::shared_ptr<Segment> Segment::create(const char* name, size_t bytes, Access access) {
  Descriptor file{memfd_create(name, MFD_CLOEXEC)};
  FSDP_CHECK(file.fd >= 0, "[shared memory] could not create a segment: ", reason());
  rlimit limit{};
  FSDP_CHECK( // beyond which the system ends the process
      getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur,
      "[shared memory] a segment of ",
      human_bytes(static_cast<int64_t>(bytes)),
      " is more than the limit on file sizes allows: ulimit -f unlimited");
  FSDP_CHECK(
      ftruncate(file.fd, static_cast<off_t>(bytes)) == 0,
      "[shared memory] could not size a segment to ",
      human_bytes(static_cast<int64_t>(bytes)),
      ": ",
      reason());
  std::shared_ptr<Segment> segment(new Segment(identify(file.fd, bytes), file.fd, access));
  segment->own_fd_ = file.release();
  std::lock_guard lock(registry().mutex);
  registry().segments[key(segment->id_)] = segment;
  return segment;
}

std::shared_ptr<Segment> Segment::open(const SegmentId& id, Access access) {
  std::lock_guard lock(registry().mutex);
  auto& known = registry().segments[key(id)];
  if (auto segment = known.lock()) {
    return segment;
  }
  const std::string path = "/proc/" + std::to_string(id.pid) + "/fd/" + std::to_string(id.fd);
  Descriptor file{::open(path.c_str(), (access == Access::kRead ? O_RDONLY : O_RDWR) | O_CLOEXEC)};
  FSDP_CHECK(file.fd >= 0, "[shared memory] could not open ", path, " of another rank: ", reason());
  const SegmentId found = identify(file.fd, id.bytes);
  FSDP_CHECK(key(found) == key(id), "[shared memory] ", path, " is not the segment that the other rank announced");
  std::shared_ptr<Segment> segment(new Segment(id, file.fd, access));
  known = segment;
  return segment;
}

Segment::Segment(const SegmentId& id, int fd, Access access) : id_(id) {
  if (access != Access::kRead) {
    writable_ = map(fd, id.bytes, PROT_READ | PROT_WRITE);
  }
  if (access != Access::kWrite) {
    readable_ = map(fd, id.bytes, PROT_READ);
  }
}

Segment::~Segment() {
  hide();
  std::lock_guard lock(registry().mutex);
  const auto found = registry().segments.find(key(id_));
  if (found != registry().segments.end() && found->second.expired()) {
    registry().segments.erase(found);
  }
}

void Segment::hide() {
  if (const int fd = std::exchange(own_fd_, -1); fd >= 0) {
    close(fd);
  }
}

void Segment::punch(size_t offset, size_t bytes) const {
  if (own_fd_ >= 0) {
    fallocate(
        own_fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  }
}

} // namespace fsdp::shm
