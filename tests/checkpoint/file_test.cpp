#include "checkpoint/file.h"

#include <filesystem>

#include <sys/stat.h>

#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp::disk {
namespace {

using testing::contains;
using testing::error_message;

class Files : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const {
    return (folder_.path() / name).string();
  }

 private:
  testing::detail::TemporaryFolder folder_;
};

TEST_F(Files, GiveBackWhatWasWritten) {
  write_text(path("a"), "some text");
  EXPECT_EQ(read_text(path("a"), 9, File::Links::kRefuse), "some text");
  const File file = File::open(path("a"), File::Links::kRefuse);
  char part[4];
  file.read(5, part, 4);
  EXPECT_EQ(std::string(part, 4), "text");
  EXPECT_TRUE(contains(error_message([&] { file.read(6, part, 4); }), "/a ends 1 bytes too early"));
}

TEST_F(Files, AreNotOverwritten) {
  write_text(path("a"), "old");
  EXPECT_TRUE(contains(error_message([&] { write_text(path("a"), "new"); }), "could not create " + path("a")));
  EXPECT_EQ(read_text(path("a"), 100, File::Links::kRefuse), "old");
}

TEST_F(Files, ThatAreTooLongAreNotRead) {
  write_text(path("a"), "some text");
  const auto message = error_message([&] { read_text(path("a"), 8, File::Links::kRefuse); });
  EXPECT_TRUE(contains(message, "has 9 bytes, where no more than 8")) << message;
}

TEST_F(Files, AreNoLinksUnlessTheseAreAllowed) {
  write_text(path("a"), "text");
  std::filesystem::create_symlink(path("a"), path("link"));
  EXPECT_TRUE(contains(error_message([&] { File::open(path("link"), File::Links::kRefuse); }), "/link is a link"));
  EXPECT_EQ(read_text(path("link"), 100, File::Links::kFollow), "text");
}

TEST_F(Files, AreNeitherFoldersNorPipes) {
  std::filesystem::create_directory(path("folder"));
  ASSERT_EQ(mkfifo(path("pipe").c_str(), 0600), 0);
  for (const char* name : {"folder", "pipe"}) {
    EXPECT_TRUE(contains(error_message([&] { File::open(path(name), File::Links::kFollow); }), "is something else"));
  }
  EXPECT_TRUE(contains(error_message([&] { File::open(path("none"), File::Links::kFollow); }), "No such file"));
}

} // namespace
} // namespace fsdp::disk
