#include "base/this_process.h"

#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace fsdp {
namespace {

/// Whether processes forked from one another know their numbers, that many deep.
bool known_in_children(int depth) {
  if (this_process() != getpid()) {
    return false;
  }
  if (depth == 0) {
    return true;
  }
  const pid_t child = fork();
  if (child == 0) {
    _exit(known_in_children(depth - 1) ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return status == 0;
}

TEST(ThisProcess, IsKnownToForkedChildren) {
  EXPECT_TRUE(known_in_children(2));
}

} // namespace
} // namespace fsdp
