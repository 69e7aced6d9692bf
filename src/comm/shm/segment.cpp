#include "comm/shm/segment.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <c10/util/Exception.h>

#include "base/check.h"
#include "base/format.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace fsdp::shm {

// The segments mapped by this process, so that ranks that are threads share one mapping.
struct Registry {
  std::mutex mutex;
  std::map<std::pair<uint64_t, uint64_t>, std::weak_ptr<Segment>> segments;

  Registry() {
    pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
  }
  static Registry& get() {
    static auto* registry = new Registry; // outlives every segment
    return *registry;
  }

 private:
  static void before_fork() {
    get().mutex.lock();
  }
  static void after_fork_in_parent() {
    get().mutex.unlock();
  }
  static void after_fork_in_child() {
    for (const auto& [key, known] : get().segments) {
      const auto segment = known.lock();
      if (segment && !std::exchange(segment->has_parted_, true)) { // else the pages are this family's own already
        segment->part_from_parent(segment->writable_.get());
        segment->part_from_parent(segment->readable_.get());
      }
    }
    get().mutex.unlock();
  }
};

namespace {

// It cannot be cut short, so that no access to it is beyond its end.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::pair<uint64_t, uint64_t> key(const SegmentId& id) {
  return {id.device, id.inode};
}

std::string reason() {
  return std::strerror(errno);
}

SegmentId identify(int fd, size_t bytes) {
  struct stat status {};
  FSDP_CHECK(fstat(fd, &status) == 0, "[shared memory] could not examine a segment: {}", reason());
  return {static_cast<int32_t>(getpid()), fd, status.st_dev, status.st_ino, bytes};
}

// To write one would fill all that is only reserved.
void leave_out_of_dumps(void* memory, size_t bytes) {
  madvise(memory, bytes, MADV_DONTDUMP);
}

Mapping map(int fd, size_t bytes, int protection) {
  void* memory = mmap(nullptr, bytes, protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
  FSDP_CHECK(
      memory != MAP_FAILED,
      "[shared memory] could not map {}: {}; raise the limits on address space and mappings (ulimit -v, "
      "vm.max_map_count)",
      human_bytes(static_cast<int64_t>(bytes)),
      reason());
  leave_out_of_dumps(memory, bytes);
  return {static_cast<char*>(memory), Unmap{bytes}};
}

// Closes a descriptor at the end of a scope.
struct Descriptor {
  int fd;
  explicit Descriptor(int fd_) : fd(fd_) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd >= 0) {
      close(fd);
    }
  }
  int release() {
    return std::exchange(fd, -1);
  }
};

// Systems may forbid memory files that could be executed (vm.memfd_noexec); older ones do not know the word.
int make_file(const char* name) {
  const int file = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  return file >= 0 || errno != EINVAL ? file : memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
}

std::string path_of(int32_t pid, int fd) {
  return "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
}

// Opened only once it is known to be the file that was meant: to open another might wait, or do something.
int open_file(const SegmentId& id, Access access) {
  const std::string path = path_of(id.pid, id.fd);
  const Descriptor place(::open(path.c_str(), O_PATH | O_CLOEXEC));
  FSDP_CHECK(place.fd >= 0, "[shared memory] could not open {} of another rank: {}", path, reason());
  struct stat status {};
  FSDP_CHECK(fstat(place.fd, &status) == 0, "[shared memory] could not examine {}: {}", path, reason());
  FSDP_CHECK(
      S_ISREG(status.st_mode) && status.st_nlink == 0 && status.st_uid == geteuid() && status.st_dev == id.device &&
          status.st_ino == id.inode,
      "[shared memory] {} is not the segment that the other rank announced",
      path);
  const int file =
      ::open(path_of(getpid(), place.fd).c_str(), (access == Access::kRead ? O_RDONLY : O_RDWR) | O_CLOEXEC);
  FSDP_CHECK(file >= 0, "[shared memory] could not open {} of another rank: {}", path, reason());
  return file;
}

// Of an open file: what is sealed stays as it is now.
void check_size(int file, uint64_t bytes) {
  struct stat status {};
  FSDP_CHECK(
      fcntl(file, F_GET_SEALS) >= 0 && (fcntl(file, F_GET_SEALS) & kSeals) == kSeals && fstat(file, &status) == 0 &&
          bytes > 0 && static_cast<uint64_t>(status.st_size) == bytes,
      "[shared memory] expected a sealed segment of {} bytes from another rank, got one of {}; all ranks must run the "
      "same build",
      bytes,
      status.st_size);
}

constexpr std::string_view kTouchedInChild =
    "[fork] a forked child touched shards, or other memory that the ranks of its parent share; copy what a child needs "
    "before the fork, or start it by spawn\n";

struct sigaction action_before {}; // what a SIGSEGV did

std::vector<std::pair<const char*, const char*>>& left_behind() {
  static auto* left_behind = new std::vector<std::pair<const char*, const char*>>; // looked at until the very end
  return *left_behind;
}

void on_fault(int signal, siginfo_t* info, void*) {
  const auto* address = static_cast<const char*>(info->si_addr);
  for (const auto& [begin, end] : left_behind()) {
    if (info->si_code > 0 && begin <= address && address < end) {
      static_cast<void>(!write(STDERR_FILENO, kTouchedInChild.data(), kTouchedInChild.size()));
      break;
    }
  }
  sigaction(signal, &action_before, nullptr); // to which an access that is tried again leads
  if (info->si_code <= 0) {
    raise(signal); // it was sent
  }
}

// In a forked child: makes these addresses what no access survives, and says why on stderr before a SIGSEGV that this
// causes takes its course. Called by one thread.
void leave_behind(char* memory, size_t bytes) {
  const void* mapped = mmap(memory, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  TORCH_INTERNAL_ASSERT(mapped != MAP_FAILED, "a forked child would share memory with its parent");
  if (left_behind().empty()) {
    struct sigaction action {};
    action.sa_sigaction = &on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &action_before);
  }
  left_behind().emplace_back(memory, memory + bytes);
}

} // namespace

void Unmap::operator()(char* memory) const {
  munmap(memory, bytes);
}

std::shared_ptr<Segment> Segment::create(const char* name, size_t bytes, Access access) {
  Descriptor file(make_file(name));
  FSDP_CHECK(file.fd >= 0, "[shared memory] could not create a segment: {}", reason());
  rlimit limit{};
  FSDP_CHECK( // beyond which the system ends the process
      getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur,
      "[shared memory] a segment of {} is more than the limit on file sizes allows: ulimit -f unlimited",
      human_bytes(static_cast<int64_t>(bytes)));
  FSDP_CHECK(
      ftruncate(file.fd, static_cast<off_t>(bytes)) == 0,
      "[shared memory] could not size a segment to {}: {}",
      human_bytes(static_cast<int64_t>(bytes)),
      reason());
  FSDP_CHECK(
      fcntl(file.fd, F_ADD_SEALS, kSeals) == 0, "[shared memory] could not seal the size of a segment: {}", reason());
  std::shared_ptr<Segment> segment(new Segment(identify(file.fd, bytes), file.fd, access));
  segment->own_fd_ = file.release();
  std::lock_guard lock(Registry::get().mutex);
  Registry::get().segments[key(segment->id_)] = segment;
  return segment;
}

std::shared_ptr<Segment> Segment::open(const SegmentId& id, Access access) {
  std::lock_guard lock(Registry::get().mutex);
  auto& known = Registry::get().segments[key(id)];
  if (auto segment = known.lock()) {
    return segment;
  }
  const Descriptor file(open_file(id, access));
  check_size(file.fd, id.bytes);
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
  std::lock_guard lock(Registry::get().mutex);
  auto& segments = Registry::get().segments;
  const auto found = segments.find(key(id_));
  if (found != segments.end() && found->second.expired()) {
    segments.erase(found);
  }
}

void Segment::part_from_parent(char* mapping) const {
  if (!mapping) {
    return;
  }
  if (!kept_in_children_) {
    return leave_behind(mapping, bytes());
  }
  const void* mapped =
      mmap(mapping, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, own_fd_, 0);
  if (mapped == MAP_FAILED) { // where the system promises no more memory than it has
    return leave_behind(mapping, bytes());
  }
  leave_out_of_dumps(mapping, bytes());
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
