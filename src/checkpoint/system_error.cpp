#include "checkpoint/system_error.h"

#include <cerrno>
#include <system_error>

#include "base/check.h"

namespace fsdp::disk {

namespace {

const char* advice(int code) {
  switch (code) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return "make room, or give another folder";
    case EACCES:
    case EPERM:
    case EROFS:
      return "give a folder in which this user may write, or files that it may read";
    case EEXIST:
    case ENOTDIR:
    case EISDIR:
      return "there is a file where a folder is wanted, or a folder in place of a file: give another path";
    case ENAMETOOLONG:
      return "give a shorter one";
    case ENOENT:
      return "give a folder that all ranks see";
    default:
      return "see whether the disk is well";
  }
}

} // namespace

void check_system(bool succeeded, const char* verb, const std::string& path) {
  const int code = errno;
  FSDP_CHECK(
      succeeded,
      "[checkpoint] could not {} {}: {}; {}",
      verb,
      path,
      std::generic_category().message(code),
      advice(code));
}

} // namespace fsdp::disk
