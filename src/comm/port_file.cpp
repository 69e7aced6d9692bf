#include "comm/port_file.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <system_error>

#include <sys/stat.h>
#include <unistd.h>

#include "base/check.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;

fs::path folder() {
  const fs::path memory = "/dev/shm";
  return (fs::is_directory(memory) ? memory : fs::path("/tmp")) / phrase("libfsdp-{}", geteuid());
}

/// Others could else put a file there that leads the ranks to them.
void require_own(const fs::path& path) {
  struct stat status {};
  const bool is_ours = lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode) && status.st_uid == geteuid() &&
                       (status.st_mode & (S_IRWXG | S_IRWXO)) == 0;
  FSDP_CHECK(
      is_ours,
      "[init] expected {} to be a folder that only this user can use; remove it, or set MASTER_PORT to a free port on "
      "all ranks",
      path.string());
}

void withdraw(const fs::path& file) {
  std::error_code gone_already;
  fs::remove(file, gone_already);
}

} // namespace

fs::path port_file(const std::string& job) {
  std::string name = job;
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return !std::isalnum(c); }, '_');
  return folder() / ("port-" + name);
}

void publish_port(const std::string& job, uint16_t port) {
  mkdir(folder().c_str(), S_IRWXU); // by whichever job is first
  require_own(folder());
  const fs::path path = port_file(job);
  const fs::path unfinished = phrase("{}.{}", path.string(), getpid());
  std::ofstream file(unfinished);
  file << port << '\n';
  file.close();
  if (!file) {
    withdraw(unfinished);
    fail("[init] rank 0 could not write {}: free space there, or set MASTER_PORT on all ranks", unfinished.string());
  }
  fs::rename(unfinished, path);
}

std::optional<uint16_t> published_port(const std::string& job) {
  std::ifstream file(port_file(job));
  uint16_t port = 0;
  if (!(file >> port) || port == 0) {
    return std::nullopt;
  }
  require_own(folder());
  return port;
}

void withdraw_port(const std::string& job) {
  withdraw(port_file(job));
}

} // namespace fsdp
