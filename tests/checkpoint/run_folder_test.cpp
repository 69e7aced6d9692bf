// The folder of a run: whatever happens while a checkpoint is written, the one before is there, whole.

#include "checkpoint/run_folder.h"

#include <filesystem>

#include <sys/resource.h>
#include <sys/wait.h>

#include "checkpoint/file.h"
#include "checkpoint/folder.h"
#include "checkpoint/system_calls.h"
#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp::disk {
namespace {

using testing::contains;
using testing::error_message;
using Names = std::vector<std::string>;

class RunFolders : public ::testing::Test {
 protected:
  std::string path() const {
    return (folder_.path() / "runs" / "one").string();
  }
  /// A checkpoint of two files that say which step it is.
  std::string write(int64_t step, int64_t keep = 0) const {
    const RunFolder run(path());
    const auto begun = run.begin(step);
    for (const char* name : {"rank.safetensors", kIndexName}) {
      write_text(begun + "/" + name, text_of(step));
    }
    auto finished = run.finish(begun, step);
    if (keep > 0) {
      run.keep_last(keep, finished);
    }
    return finished;
  }
  static std::string text_of(int64_t step) {
    return "this is step " + std::to_string(step);
  }
  static void expect_whole(const std::string& checkpoint, int64_t step) {
    for (const char* name : {"rank.safetensors", kIndexName}) {
      EXPECT_EQ(read_text(checkpoint + "/" + name, 100, File::Links::kRefuse), text_of(step));
    }
  }

 private:
  testing::detail::TemporaryFolder folder_;
};

TEST_F(RunFolders, HaveALatestCheckpoint) {
  const RunFolder run(path());
  EXPECT_EQ(run.latest(), std::nullopt);
  EXPECT_EQ(write(9), path() + "/step-00000009");
  EXPECT_EQ(write(123456789), path() + "/step-123456789");
  EXPECT_EQ(run.latest(), path() + "/step-123456789");
  expect_whole(*run.latest(), 123456789);
}

TEST_F(RunFolders, OverlookWhatIsNoCheckpoint) {
  write(1);
  for (const char* name :
       {"step-", "step-x", "step-9x", "step-9.", "step-9.x", "step--9", "stop-9", "step-9", "notes"}) {
    make_folders(path() + "/" + name);
  }
  make_folders(path() + "/step-00000008/" + kIndexName); // which is no file
  write_text(path() + "/step-00000007", "a file");
  EXPECT_EQ(RunFolder(path()).latest(), path() + "/step-00000001");
}

TEST_F(RunFolders, KeepTheLast) {
  for (const int64_t step : {1, 2, 3, 4}) {
    write(step, /*keep=*/2);
  }
  EXPECT_EQ(names_in(path()), (Names{"step-00000003", "step-00000004"}));
  write(1, /*keep=*/1);
  EXPECT_EQ(names_in(path()), (Names{"step-00000001", "step-00000004"})) << "what has just been saved is kept";
}

TEST_F(RunFolders, ReplaceACheckpointOfTheSameStep) {
  write(1);
  EXPECT_EQ(write(1), path() + "/step-00000001.1");
  EXPECT_EQ(write(1), path() + "/step-00000001.2");
  EXPECT_EQ(names_in(path()), (Names{"step-00000001.2"}));
  EXPECT_EQ(RunFolder(path()).latest(), path() + "/step-00000001.2");
}

TEST_F(RunFolders, RemoveFoldersButNotWhatLinksPointTo) {
  write_text((std::filesystem::path(path()).parent_path().parent_path() / "other").string(), "text");
  const RunFolder run(path());
  const auto begun = run.begin(1);
  make_folders(begun + "/a/b");
  std::filesystem::create_directory_symlink(std::filesystem::path(path()).parent_path().parent_path(), begun + "/link");
  run.begin(2);
  EXPECT_EQ(names_in(path()), (Names{".tmp-step-00000002"}));
  EXPECT_TRUE(is_file((std::filesystem::path(path()).parent_path().parent_path() / "other").string()));
}

TEST_F(RunFolders, KeepWhatLinksPointTo) {
  const std::string other = path() + "-other/step-00000001";
  make_folders(other);
  write_text(other + "/" + kIndexName, text_of(1));
  make_folders(path());
  std::filesystem::create_directory_symlink(other, path() + "/step-00000001");
  write(2, /*keep=*/1);
  EXPECT_EQ(names_in(path()), (Names{"step-00000002"}));
  EXPECT_EQ(names_in(other), (Names{kIndexName}));
  std::filesystem::create_directory_symlink(other, path() + "/.tmp-step-00000003");
  write(3);
  EXPECT_EQ(names_in(path()), (Names{"step-00000002", "step-00000003"}));
  EXPECT_EQ(names_in(other), (Names{kIndexName}));
}

TEST_F(RunFolders, GetCheckpointsWhateverCannotBeRemoved) {
  const std::string left = path() + "/.tmp-step-00000009";
  make_folders(left);
  write_text(left + "/.nfs0001", "in use");
  write_text(path() + "/.tmp-step-00000008", "a file");
  testing::refuse_to_remove("/.nfs0001");
  EXPECT_EQ(write(1), path() + "/step-00000001");
  EXPECT_TRUE(contains(error_message([&] { write(9); }), "could not remove " + left + "/.nfs0001"));
  testing::refuse_to_remove("/rank.safetensors");
  EXPECT_EQ(write(1), path() + "/step-00000001.1");
  EXPECT_EQ(write(2, /*keep=*/1), path() + "/step-00000002");
  testing::refuse_to_remove("");
  EXPECT_EQ(write(3, /*keep=*/1), path() + "/step-00000003");
  EXPECT_EQ(names_in(path()), (Names{"step-00000003"}));
}

TEST_F(RunFolders, ThatCannotBeReadToTheirEndAreNamed) {
  write(1);
  testing::fail_to_list(true);
  const auto message = error_message([&] { RunFolder(path()).latest(); });
  testing::fail_to_list(false);
  EXPECT_TRUE(contains(message, "could not look into " + path())) << message;
}

TEST_F(RunFolders, AreOnTheDiskWithTheFoldersAboveThem) {
  testing::fail_from_point(-1);
  make_folders(path());
  EXPECT_EQ(testing::points(), 4) << "two folders are made, and the names of both are flushed";
}

int64_t step_of(const std::string& checkpoint) {
  return checkpoint.find("step-00000001") != std::string::npos ? 1 : 2;
}

constexpr int kKilled = -1;

/// The status with which the child ends.
int run_in_child(const std::function<void()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) || WTERMSIG(status) == SIGKILL);
  return WIFEXITED(status) ? WEXITSTATUS(status) : kKilled;
}

TEST_F(RunFolders, AreWholeWhereverTheProcessIsKilled) {
  write(1);
  int64_t point = 0, old = 0;
  for (bool ended = false; !ended; ++point) {
    const int status = run_in_child([&] {
      testing::kill_at_point(point);
      write(2, /*keep=*/1);
    });
    ended = status == 0;
    ASSERT_TRUE(ended || status == kKilled) << status;
    const auto latest = RunFolder(path()).latest();
    ASSERT_TRUE(latest);
    const int64_t step = step_of(*latest);
    old += step == 1 ? 1 : 0;
    expect_whole(*latest, step);
    write(1, /*keep=*/1); // cleans up
    for (const auto& name : names_in(path())) {
      EXPECT_FALSE(name.starts_with(".tmp")) << point;
      if (name.starts_with("step-00000002")) {
        remove_folder_tree(path() + "/" + name);
      }
    }
  }
  EXPECT_GT(old, 8) << "before the checkpoint is there";
  EXPECT_GT(point, old + 4) << "and afterwards";
}

TEST_F(RunFolders, AreWholeWhereverTheDiskIsFull) {
  write(1);
  bool written = false;
  for (int64_t point = 0; !written; ++point) {
    testing::fail_from_point(point);
    std::string message;
    try {
      write(2);
      written = true;
    } catch (const Error& error) {
      message = error.what();
    }
    testing::fail_from_point(-1);
    EXPECT_TRUE(written || contains(message, "No space left on device; make room")) << message;
    EXPECT_TRUE(written || contains(message, path())) << message;
    const auto latest = RunFolder(path()).latest();
    ASSERT_TRUE(latest);
    expect_whole(*latest, step_of(*latest));
  }
}

TEST_F(RunFolders, AreWholeWhereAFileMayNotGrow) {
  write(1);
  const int status = run_in_child([&] {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{5, 5};
    setrlimit(RLIMIT_FSIZE, &limit);
    try {
      write(2);
    } catch (const Error& error) {
      const std::string message = error.what();
      _exit(contains(message, "could not write " + path()) && contains(message, "File too large") ? 0 : 1);
    }
    _exit(2);
  });
  EXPECT_EQ(status, 0);
  expect_whole(*RunFolder(path()).latest(), 1);
}

TEST_F(RunFolders, ThatCannotBeWrittenAreNamed) {
  make_folders(path());
  write_text(path() + "/file", "text");
  const auto message = error_message([&] { RunFolder(path() + "/file/inner").begin(1); });
  EXPECT_TRUE(contains(message, "could not make the folder " + path() + "/file")) << message;
  const auto read_only = error_message([&] { RunFolder("/proc/self/inner").begin(1); });
  EXPECT_TRUE(contains(read_only, "could not make the folder /proc/self/inner")) << read_only;
}

} // namespace
} // namespace fsdp::disk
