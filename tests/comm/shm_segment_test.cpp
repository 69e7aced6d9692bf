#include "comm/shm/segment.h"

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "support/error_message.h"

/// Segments that others announce.
namespace fsdp::shm {
namespace {

using testing::contains;
using testing::error_message;

constexpr size_t kBytes = 1 << 16;

// What somebody who lies would announce for a descriptor of this process.
SegmentId announced(int fd) {
  struct stat status {};
  EXPECT_EQ(fstat(fd, &status), 0);
  return {getpid(), fd, status.st_dev, status.st_ino, kBytes};
}

std::string refusal(const SegmentId& id) {
  return error_message([&] { Segment::open(id, Access::kRead); });
}

// Ranks of one process get each other's Segment; this is how another process sees it.
SegmentId with_another_descriptor(const Segment& segment) {
  const int copy = open(("/proc/self/fd/" + std::to_string(segment.id().fd)).c_str(), O_RDWR);
  return announced(copy);
}

TEST(Segments, CannotBeCutShort) {
  const auto segment = Segment::create("fsdp-test", kBytes, Access::kReadAndWrite);
  const SegmentId id = with_another_descriptor(*segment);
  EXPECT_NE(ftruncate(id.fd, 4096), 0);
  segment->punch(0, kBytes); // pages may go
  close(id.fd);
}

TEST(Segments, AreNotExecutable) {
  const auto segment = Segment::create("fsdp-test", kBytes, Access::kReadAndWrite);
  struct stat status {};
  ASSERT_EQ(fstat(segment->id().fd, &status), 0);
  constexpr unsigned kNoExecSeal = 8; // MFD_NOEXEC_SEAL, of kernels that know it
  const int probe = memfd_create("probe", kNoExecSeal);
  if (probe < 0) {
    GTEST_SKIP() << "this kernel has no memory that cannot be executed";
  }
  close(probe);
  EXPECT_EQ(status.st_mode & 0111, 0u);
}

// "VmFlags: rd wr sh ..." of the mapping that begins there.
std::string flags_of_mapping(const void* begin) {
  std::ifstream lines("/proc/self/smaps");
  std::ostringstream address;
  address << std::hex << reinterpret_cast<uintptr_t>(begin) << '-';
  std::string line;
  while (std::getline(lines, line) && line.rfind(address.str(), 0) != 0) {
  }
  while (std::getline(lines, line) && line.rfind("VmFlags:", 0) != 0) {
  }
  return line + ' ';
}

// To dump one would fill all that is reserved.
TEST(Segments, AreNotInCoreDumps) {
  const auto segment = Segment::create("fsdp-test", kBytes, Access::kReadAndWrite);
  EXPECT_TRUE(contains(flags_of_mapping(segment->writable()), " sh "));
  EXPECT_TRUE(contains(flags_of_mapping(segment->writable()), " dd "));
  EXPECT_TRUE(contains(flags_of_mapping(segment->readable()), " dd "));
}

TEST(Segments, AFileWithANameIsNone) {
  char name[] = "/dev/shm/segment-test-XXXXXX";
  const int file = mkstemp(name);
  ASSERT_EQ(ftruncate(file, kBytes), 0);
  EXPECT_TRUE(contains(refusal(announced(file)), "is not the segment"));
  unlink(name);
  EXPECT_TRUE(contains(refusal(announced(file)), "sealed segment")) << "nor one that can be cut short";
  close(file);
}

TEST(Segments, AMemfdThatCanBeCutShortIsNone) {
  const int file = memfd_create("fsdp-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(file, kBytes), 0);
  EXPECT_TRUE(contains(refusal(announced(file)), "sealed segment"));
  close(file);
}

TEST(Segments, OneThatIsSmallerThanAnnouncedIsNone) {
  const int file = memfd_create("fsdp-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(file, kBytes / 2), 0);
  ASSERT_EQ(fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  EXPECT_TRUE(contains(refusal(announced(file)), "got one of 32768"));
  close(file);
}

// To open its reading end would wait for a writer.
TEST(Segments, APipeIsNone) {
  const std::string name = ::testing::TempDir() + "fsdp-pipe-" + std::to_string(getpid());
  ASSERT_EQ(mkfifo(name.c_str(), 0600), 0);
  const int pipe = open(name.c_str(), O_RDWR);
  unlink(name.c_str());
  EXPECT_TRUE(contains(refusal(announced(pipe)), "is not the segment"));
  close(pipe);
}

TEST(Segments, OneOfAnotherUserIsNone) {
  if (geteuid() != 0) {
    GTEST_SKIP() << "needs the right to give files away";
  }
  const int file = memfd_create("fsdp-test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(file, kBytes), 0);
  ASSERT_EQ(fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL), 0);
  EXPECT_NE(Segment::open(announced(file), Access::kRead), nullptr);
  ASSERT_EQ(fchown(file, 12345, 12345), 0);
  EXPECT_TRUE(contains(refusal(announced(file)), "is not the segment"));
  close(file);
}

} // namespace
} // namespace fsdp::shm
