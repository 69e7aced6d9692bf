#include "comm/memory_limit.h"

#include <filesystem>
#include <fstream>
#include <string>

#include <gtest/gtest.h>
#include <unistd.h>

#include "support/remove_folder.h"

namespace fsdp {
namespace {

using std::filesystem::path;

/// A made-up machine's files.
class MemoryLimit : public ::testing::Test {
 protected:
  void TearDown() override {
    testing::remove_folder(root_);
  }
  void write(const path& file, const std::string& text) const {
    std::filesystem::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text << "\n";
  }
  size_t limit() const {
    return memory_limit(root_);
  }

  const path root_ = path(::testing::TempDir()) / ("fsdp-memory-" + std::to_string(getpid()));
  const size_t everything_ = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
};

TEST_F(MemoryLimit, IsTheMachinesMemoryWhereNoGroupHasOne) {
  EXPECT_EQ(limit(), everything_);
  write("proc/self/cgroup", "0::/user.slice/job");
  write("sys/fs/cgroup/user.slice/job/memory.max", "max");
  EXPECT_EQ(limit(), everything_);
}

TEST_F(MemoryLimit, IsTheSmallestOfTheGroupsAbove) {
  write("proc/self/cgroup", "0::/user.slice/job/step");
  write("sys/fs/cgroup/user.slice/memory.max", "90000000");
  write("sys/fs/cgroup/user.slice/job/memory.max", "70000000");
  write("sys/fs/cgroup/user.slice/job/step/memory.max", "max");
  EXPECT_EQ(limit(), 70000000u);
}

TEST_F(MemoryLimit, OfVersionOneIsAmongTheControllers) {
  write("proc/self/cgroup", "5:cpu,memory:/job\n2:cpuset:/other\n0::/");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712");
  write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "50000000");
  EXPECT_EQ(limit(), 50000000u);
}

TEST_F(MemoryLimit, InAContainerIsThatOfTheMountedGroup) {
  write("proc/self/cgroup", "0::/docker/0123");
  write("sys/fs/cgroup/memory.max", "60000000");
  EXPECT_EQ(limit(), 60000000u);
}

} // namespace
} // namespace fsdp
