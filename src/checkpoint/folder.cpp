#include "checkpoint/folder.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <memory>
#include <sstream>

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/format.h"
#include "checkpoint/system_error.h"

namespace fsdp::disk {

std::string from_root(const std::string& path) {
  if (path.starts_with('/')) {
    return path;
  }
  char here[PATH_MAX] = "";
  const bool is_known = ::getcwd(here, sizeof(here)) != nullptr; // it may have been removed: whoever goes there is told
  return is_known ? std::string(here) + "/" + path : path;
}

std::string plain_path(const std::string& path) {
  std::vector<std::string> names;
  std::istringstream given(from_root(path));
  for (std::string name; std::getline(given, name, '/');) {
    if (name == ".." && !names.empty()) {
      names.pop_back();
    } else if (!name.empty() && name != "." && name != "..") {
      names.push_back(name);
    }
  }
  return "/" + join(names, "/");
}

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
  if (made) {
    flush_folder(slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash));
  }
}

namespace {

struct CloseFolder {
  void operator()(DIR* folder) const {
    ::closedir(folder);
  }
};

/// Of a folder that is open, which is closed.
std::vector<std::string> names_behind(int descriptor, const std::string& path) {
  const std::unique_ptr<DIR, CloseFolder> folder(::fdopendir(descriptor));
  check_system(folder != nullptr, "look into", path);
  std::vector<std::string> names;
  errno = 0; // which tells an error from the end
  while (const dirent* entry = ::readdir(folder.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") {
      names.push_back(name);
    }
    errno = 0;
  }
  check_system(errno == 0, "look into", path);
  std::sort(names.begin(), names.end());
  return names;
}

} // namespace

std::vector<std::string> names_in(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0 && errno == ENOENT) {
    return {};
  }
  check_system(descriptor >= 0, "look into", path);
  return names_behind(descriptor, path);
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

namespace {

bool is_there(const std::string& path, struct stat& status) {
  const bool found = ::lstat(path.c_str(), &status) == 0;
  check_system(found || errno == ENOENT || errno == ENOTDIR || errno == ENAMETOOLONG, "look at", path);
  return found;
}

} // namespace

void remove_folder_tree(const std::string& path) {
  struct stat status {};
  if (!is_there(path, status)) {
    return;
  }
  if (!S_ISDIR(status.st_mode)) {
    return remove_file(path);
  }
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  check_system(descriptor >= 0, "look into", path);
  for (const auto& name : names_behind(descriptor, path)) {
    remove_folder_tree(path + "/" + name);
  }
  check_system(::rmdir(path.c_str()) == 0, "remove", path);
}

} // namespace fsdp::disk
