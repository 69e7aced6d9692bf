#include "base/this_process.h"

#include <unistd.h>

#include "support/end_of_child.h"

namespace fsdp::testing {
namespace {

/// Whether processes forked from one another know their numbers, that many deep.
bool known_in_children(int depth) {
  if (this_process() != getpid()) {
    return false;
  }
  return depth == 0 || end_of_child([&] { EXPECT_TRUE(known_in_children(depth - 1)); }).status == 0;
}

TEST(ThisProcess, IsKnownToForkedChildren) {
  EXPECT_TRUE(known_in_children(2));
}

} // namespace
} // namespace fsdp::testing
