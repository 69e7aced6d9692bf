#include "checkpoint/folder.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/system_error.h"

namespace fsdp::disk {

// std::filesystem's functions that walk through folders crash beside LibTorch 2.11.
void make_folders(const std::string& path) {
  if (path.empty() || is_folder(path)) {
    return;
  }
  const auto slash = path.find_last_of('/');
  if (slash != std::string::npos) {
    make_folders(path.substr(0, slash));
  }
  const bool made = ::mkdir(path.c_str(), 0777) == 0;
  check_system(made || (errno == EEXIST && is_folder(path)), "make the folder", path);
}

std::vector<std::string> names_in(const std::string& path) {
  DIR* folder = ::opendir(path.c_str());
  if (folder == nullptr && errno == ENOENT) {
    return {};
  }
  check_system(folder != nullptr, "look into", path);
  std::vector<std::string> names;
  while (const dirent* entry = ::readdir(folder)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") {
      names.push_back(name);
    }
  }
  ::closedir(folder);
  std::sort(names.begin(), names.end());
  return names;
}

bool is_file(const std::string& path) {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode);
}

bool is_folder(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

bool exists(const std::string& path) {
  struct stat status {};
  return ::stat(path.c_str(), &status) == 0;
}

void flush_folder(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  check_system(descriptor >= 0, "open", path);
  const bool flushed = ::fsync(descriptor) == 0;
  const int code = errno;
  ::close(descriptor);
  errno = code;
  check_system(flushed || code == EINVAL, "flush", path); // some file systems have nothing to flush
}

void rename_path(const std::string& from, const std::string& to) {
  check_system(::rename(from.c_str(), to.c_str()) == 0, "rename", from + " to " + to);
}

void remove_file(const std::string& path) {
  check_system(::unlink(path.c_str()) == 0, "remove", path);
}

void remove_folder_tree(const std::string& path) {
  for (const auto& name : names_in(path)) {
    const std::string inner = path + "/" + name;
    if (::unlink(inner.c_str()) != 0) {
      const int code = errno;
      struct stat status {};
      const bool is_inner_folder = ::lstat(inner.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
      errno = code;
      check_system(is_inner_folder || code == ENOENT, "remove", inner);
      remove_folder_tree(inner);
    }
  }
  check_system(::rmdir(path.c_str()) == 0 || errno == ENOENT, "remove", path);
}

} // namespace fsdp::disk
