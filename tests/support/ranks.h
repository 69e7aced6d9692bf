#pragma once

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <unistd.h>

#include <fsdp/group.h>

#include "support/child_process.h"
#include "support/remove_folder.h"
#include "support/reserved_port.h"

/// Runs the body of a test on several ranks.
namespace fsdp::testing {

/// On threads of this process; each has a world of its own: `fsdp::rank()` and so on. Throws what the first rank threw.
inline void on_threads(
    int size, const std::function<void()>& body, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  thread_group(size, body, timeout);
}

struct ProcessOptions {
  std::chrono::seconds timeout{120}; ///< after it, the ranks are killed
  std::set<int> lost{}; ///< ranks that may end badly, or not at all
  std::map<std::string, std::string> environment{}; ///< for all ranks
};

/// In a process that `on_processes` started: its rank, and a folder that all ranks of the call can use.
inline int process_rank() {
  return std::atoi(std::getenv("RANK"));
}
inline std::filesystem::path process_folder() {
  return std::getenv("FSDP_TEST_FOLDER");
}

namespace detail {

// A child of on_processes runs the same test again. It is told which of the test's calls started it.
inline const char* call_of_child() {
  return std::getenv("FSDP_TEST_CALL");
}

inline std::string current_test() {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  return std::string(test->test_suite_name()) + "." + test->name();
}

inline int next_call() {
  static std::map<std::string, int> calls;
  return calls[current_test()]++;
}

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "fsdp-test-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  ~TemporaryFolder() {
    remove_folder(path_);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::filesystem::path& path() const {
    return path_;
  }

 private:
  std::filesystem::path path_;
};

inline bool body_is_over = false;

/// For a program's end LibTorch takes its operators out of its tables one by one, which takes longer than most bodies.
/// All that a body made has gone by then, as at any end of a program.
inline void end_without_libtorch(int status, void*) {
  if (body_is_over) {
    std::fflush(nullptr);
    _exit(status);
  }
}

[[noreturn]] inline void run_child(const std::function<void()>& body) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) // which report at the very end
  on_exit(&end_without_libtorch, nullptr);
#endif
  try {
    body();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "rank " << process_rank() << " threw: " << error.what();
  }
  body_is_over = true;
  std::exit(::testing::Test::HasFailure() ? 1 : 0);
}

using Children = std::vector<std::unique_ptr<ChildProcess>>;

struct Launch {
  int size;
  std::string filter; // of tests
  std::map<std::string, std::string> environment;
  ReservedPort port{};
};

inline Children start(const Launch& launch, const std::filesystem::path& folder, const ProcessOptions& options) {
  Children children;
  const std::string port = std::to_string(launch.port.number());
  for (int rank = 0; rank < launch.size; ++rank) {
    std::map<std::string, std::string> environment = options.environment;
    environment.insert(launch.environment.begin(), launch.environment.end());
    environment.merge(std::map<std::string, std::string>{
        {"OMP_NUM_THREADS", "1"}, // as torchrun does: ranks share the cores
        {"RANK", std::to_string(rank)},
        {"LOCAL_RANK", std::to_string(rank)},
        {"WORLD_SIZE", std::to_string(launch.size)},
        {"MASTER_ADDR", "127.0.0.1"},
        {"MASTER_PORT", port},
        {"FSDP_TEST_FOLDER", folder.string()}});
    children.push_back(std::make_unique<ChildProcess>(
        std::vector<std::string>{"--gtest_filter=" + launch.filter, "--gtest_color=no"}, environment));
  }
  return children;
}

inline void report(int rank, const ChildProcess& child, const std::string& what) {
  ADD_FAILURE() << "rank " << rank << " " << what << ". Its output:\n" << child.output();
}

// Waits for all; the first one to fail is reported. True if all but those that may be lost ended well.
inline void await(Children& children, const ProcessOptions& options) {
  const auto deadline = std::chrono::steady_clock::now() + options.timeout;
  std::set<int> running;
  for (size_t rank = 0; rank < children.size(); ++rank) {
    if (options.lost.count(static_cast<int>(rank)) == 0) {
      running.insert(static_cast<int>(rank));
    }
  }
  while (!running.empty()) {
    for (const int rank : std::set<int>(running)) {
      ChildProcess& child = *children[static_cast<size_t>(rank)];
      if (!child.ended()) {
        continue;
      }
      running.erase(rank);
      if (!child.succeeded()) {
        return report(rank, child, child.fate());
      }
    }
    if (std::chrono::steady_clock::now() > deadline) {
      const int rank = *running.begin();
      return report(rank, *children[static_cast<size_t>(rank)], "did not end in time");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

} // namespace detail

/// On processes of their own, started with the environment that torchrun would give them. `body` runs in them only.
/// Fails the test with the first failing rank's output; no process outlives the call.
inline void on_processes(int size, const std::function<void()>& body, const ProcessOptions& options = {}) {
  const int call = detail::next_call();
  if (const char* mine = detail::call_of_child()) {
    if (std::atoi(mine) == call) {
      detail::run_child(body);
    }
    return; // an earlier call of the same test
  }
  const detail::Launch launch{size, detail::current_test(), {{"FSDP_TEST_CALL", std::to_string(call)}}};
  const detail::TemporaryFolder folder;
  auto children = detail::start(launch, folder.path(), options);
  detail::await(children, options);
}

/// Runs other tests of this program on processes, which is quicker than to start processes for each: the chosen tests
/// are run by every rank, which `in_suite` tells them.
inline void run_tests_on_processes(int size, const std::string& filter, const ProcessOptions& options = {}) {
  const detail::Launch launch{size, filter, {{"FSDP_TEST_SUITE", "1"}}};
  const detail::TemporaryFolder folder;
  auto children = detail::start(launch, folder.path(), options);
  detail::await(children, options);
}
inline bool in_suite() {
  return std::getenv("FSDP_TEST_SUITE") != nullptr;
}
/// In such a test: a folder of its own, for all ranks.
inline std::filesystem::path folder_of_test() {
  std::string name = detail::current_test();
  std::replace(name.begin(), name.end(), '/', '.');
  const auto folder = process_folder() / name;
  std::filesystem::create_directories(folder);
  return folder;
}

} // namespace fsdp::testing
