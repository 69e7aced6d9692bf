#include "checkpoint/system_calls.h"

#include <atomic>
#include <cerrno>
#include <climits>
#include <condition_variable>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <string_view>

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fsdp::testing {

namespace {

thread_local int64_t t_fails_from = -1;
thread_local int64_t t_points = 0;
thread_local std::string t_ending; // NOLINT
thread_local std::string t_in_use; // NOLINT
thread_local bool t_fails_to_list = false;
thread_local int64_t t_bytes_read = 0;
std::atomic<int64_t> g_killed_at = -1;
std::mutex g_mutex;
std::condition_variable g_changed;
std::string g_fails_to_flush; // NOLINT
std::string g_held; // NOLINT
std::atomic<int64_t> g_points = 0;

template <typename Function>
Function next(Function, const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

/// Whether the call is to be made.
bool pass_point() {
  if (g_killed_at >= 0 && g_points++ == g_killed_at) {
    raise(SIGKILL);
  }
  const bool fails = t_fails_from >= 0 && t_points >= t_fails_from;
  ++t_points;
  if (fails) {
    errno = ENOSPC;
  }
  return !fails;
}

bool may_remove(const char* path) {
  const bool in_use = !t_in_use.empty() && std::string_view(path).ends_with(t_in_use);
  if (in_use) {
    errno = EBUSY;
  }
  return !in_use;
}

bool ends_with(const std::string& path, const std::string& ending) {
  return !ending.empty() && path.ends_with(ending);
}

std::string path_of(int descriptor) {
  char path[PATH_MAX];
  const auto link = "/proc/self/fd/" + std::to_string(descriptor);
  const ssize_t length = readlink(link.c_str(), path, sizeof(path));
  return length < 0 ? "" : std::string(path, static_cast<size_t>(length));
}

/// Whether the call is to be made.
bool may_flush(int descriptor) {
  const std::string path = path_of(descriptor);
  std::unique_lock lock(g_mutex);
  g_changed.wait(lock, [&] { return !ends_with(path, g_held); });
  const bool fails = ends_with(path, g_fails_to_flush);
  if (fails) {
    errno = ENOSPC;
  }
  return !fails;
}

} // namespace

void fail_from_point(int64_t point) {
  t_fails_from = point;
  t_points = 0;
}

void kill_at_point(int64_t point) {
  g_points = 0;
  g_killed_at = point;
}

int64_t points() {
  return t_points;
}

void refuse_to_remove(const std::string& ending) {
  t_in_use = ending;
}

void fail_to_list(bool fails) {
  t_fails_to_list = fails;
}

void fail_to_flush(const std::string& ending) {
  const std::lock_guard lock(g_mutex);
  g_fails_to_flush = ending;
}

void hold_flush(const std::string& ending) {
  const std::lock_guard lock(g_mutex);
  g_held = ending;
  g_changed.notify_all();
}

void count_reads_of(const std::string& ending) {
  t_ending = ending;
  t_bytes_read = 0;
}

int64_t bytes_read() {
  return t_bytes_read;
}

} // namespace fsdp::testing

using fsdp::testing::may_flush;
using fsdp::testing::may_remove;
using fsdp::testing::next;
using fsdp::testing::pass_point;

extern "C" {

// What is a write to a terminal or a pipe passes without a point.
__attribute__((visibility("default"))) ssize_t write(int descriptor, const void* from, size_t bytes) {
  static const auto real = next(&::write, "write");
  struct stat status {};
  if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    return real(descriptor, from, bytes);
  }
  if (!pass_point()) {
    return -1;
  }
  if (bytes < 2) {
    return real(descriptor, from, bytes);
  }
  const ssize_t half = real(descriptor, from, bytes / 2);
  return half < 0 || !pass_point() ? half
                                   : half + real(descriptor, static_cast<const char*>(from) + half, bytes - half);
}

__attribute__((visibility("default"))) ssize_t pwrite(int descriptor, const void* from, size_t bytes, off_t offset) {
  static const auto real = next(&::pwrite, "pwrite");
  return pass_point() ? real(descriptor, from, bytes, offset) : -1;
}

__attribute__((visibility("default"))) int ftruncate(int descriptor, off_t length) noexcept {
  static const auto real = next(&::ftruncate, "ftruncate");
  return pass_point() ? real(descriptor, length) : -1;
}

__attribute__((visibility("default"))) ssize_t pread(int descriptor, void* to, size_t bytes, off_t offset) {
  static const auto real = next(&::pread, "pread");
  const ssize_t count = real(descriptor, to, bytes, offset);
  if (!fsdp::testing::t_ending.empty() && fsdp::testing::path_of(descriptor).ends_with(fsdp::testing::t_ending)) {
    fsdp::testing::t_bytes_read += count;
  }
  return count;
}

__attribute__((visibility("default"))) int fsync(int descriptor) {
  static const auto real = next(&::fsync, "fsync");
  return may_flush(descriptor) && pass_point() ? real(descriptor) : -1;
}

__attribute__((visibility("default"))) int mkdir(const char* path, mode_t mode) noexcept {
  static const auto real = next(&::mkdir, "mkdir");
  return pass_point() ? real(path, mode) : -1;
}

__attribute__((visibility("default"))) int rename(const char* from, const char* to) noexcept {
  static const auto real = next(&::rename, "rename");
  return pass_point() ? real(from, to) : -1;
}

__attribute__((visibility("default"))) int unlink(const char* path) noexcept {
  static const auto real = next(&::unlink, "unlink");
  return may_remove(path) && pass_point() ? real(path) : -1;
}

__attribute__((visibility("default"))) int rmdir(const char* path) noexcept {
  static const auto real = next(&::rmdir, "rmdir");
  return may_remove(path) && pass_point() ? real(path) : -1;
}

__attribute__((visibility("default"))) dirent* readdir(DIR* folder) {
  static const auto real = next(&::readdir, "readdir");
  if (fsdp::testing::t_fails_to_list) {
    errno = EIO;
    return nullptr;
  }
  return real(folder);
}
}
