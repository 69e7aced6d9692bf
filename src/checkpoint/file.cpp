#include "checkpoint/file.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"
#include "checkpoint/system_error.h"

namespace fsdp::disk {

namespace {

// The system takes no more than 2 GiB at once, and on some file systems is slow to be interrupted.
constexpr int64_t kMostAtOnce = int64_t{1} << 28;
constexpr int64_t kBetweenStarts = int64_t{1} << 24;

/// `write`: of so many bytes from a place on, as many as the system takes at once.
template <typename Write>
void write_all(const void* from, int64_t bytes, const std::string& path, const Write& write) {
  const auto* place = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t count = write(place, static_cast<size_t>(std::min(bytes, kMostAtOnce)));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    check_system(count >= 0, "write", path);
    place += count;
    bytes -= count;
  }
}

} // namespace

File::File(std::string path, int descriptor, int64_t size)
    : path_(std::move(path)), descriptor_(descriptor), size_(size) {}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)),
      descriptor_(std::exchange(other.descriptor_, -1)),
      size_(other.size_),
      flushing_(other.flushing_) {}

File::~File() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

File File::open(const std::string& path, Links links) {
  // Without waiting, should it be a pipe.
  const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK | (links == Links::kRefuse ? O_NOFOLLOW : 0);
  const int descriptor = ::open(path.c_str(), flags);
  FSDP_CHECK(
      descriptor >= 0 || errno != ELOOP,
      "[checkpoint] expected a file, but {} is a link: copy there what it points to",
      path);
  check_system(descriptor >= 0, "open", path);
  File file(path, descriptor, 0);
  struct stat status {};
  check_system(::fstat(descriptor, &status) == 0, "look at", path);
  FSDP_CHECK(S_ISREG(status.st_mode), "[checkpoint] expected a file, but {} is something else: name a file", path);
  file.size_ = status.st_size;
  return file;
}

File File::create(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  check_system(descriptor >= 0, "create", path);
  return {path, descriptor, 0};
}

File File::open_to_write(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW);
  check_system(descriptor >= 0, "open", path);
  return {path, descriptor, 0};
}

void File::read(int64_t offset, void* to, int64_t bytes) const {
  auto* place = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t count = ::pread(descriptor_, place, static_cast<size_t>(std::min(bytes, kMostAtOnce)), offset);
    if (count < 0 && errno == EINTR) {
      continue;
    }
    check_system(count >= 0, "read", path_);
    FSDP_CHECK(
        count > 0,
        "[checkpoint] {} ends {} bytes too early, and was longer when it was opened: leave checkpoints alone while "
        "they are read",
        path_,
        bytes);
    place += count;
    offset += count;
    bytes -= count;
  }
}

void File::write(const void* from, int64_t bytes) {
  write_all(from, bytes, path_, [this](const char* place, size_t most) {
    const ssize_t count = ::write(descriptor_, place, most);
    size_ += std::max<ssize_t>(count, 0);
    return count;
  });
  start_flushing();
}

// Disks are at work while more comes. No file system needs to heed it.
void File::start_flushing() {
  if (size_ - flushing_ >= kBetweenStarts) {
    static_cast<void>(::sync_file_range(descriptor_, flushing_, size_ - flushing_, SYNC_FILE_RANGE_WRITE));
    flushing_ = size_;
  }
}

void File::write_at(int64_t offset, const void* from, int64_t bytes) {
  write_all(from, bytes, path_, [this, from, offset](const char* place, size_t most) {
    return ::pwrite(descriptor_, place, most, offset + (place - static_cast<const char*>(from)));
  });
}

void File::extend(int64_t bytes) {
  check_system(::ftruncate(descriptor_, bytes) == 0, "write", path_);
  size_ = bytes;
}

void File::flush() {
  check_system(::fsync(descriptor_) == 0, "flush", path_);
}

std::string read_text(const std::string& path, int64_t limit, File::Links links) {
  const File file = File::open(path, links);
  FSDP_CHECK(
      file.size() <= limit,
      "[checkpoint] {} has {} bytes, where no more than {} are expected: it is no file of a checkpoint",
      path,
      file.size(),
      limit);
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read(0, text.data(), file.size());
  return text;
}

void write_text(const std::string& path, const std::string& text) {
  File file = File::create(path);
  file.write(text.data(), static_cast<int64_t>(text.size()));
  file.flush();
}

} // namespace fsdp::disk
