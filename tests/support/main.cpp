#include <cstdlib>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "support/fork_server.h"

namespace {

/// What is read as a program is loaded, which a forked one was with other values.
void read_environment_again() {
  for (const char* name : {"GTEST_OUTPUT", "GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX", "GTEST_SHARD_STATUS_FILE"}) {
    unsetenv(name); // meant for the program that starts it
  }
  GTEST_FLAG_SET(output, "");
  if (const char* threads = std::getenv("OMP_NUM_THREADS")) {
    at::set_num_threads(std::atoi(threads));
  }
}

} // namespace

/// As GoogleTest's own, and able to start further processes of the program.
int main(int argc, char** argv) {
  const std::string program = argv[0];
  std::vector<std::string> arguments(argv + 1, argv + argc);
  const pid_t first = getpid();
  fsdp::testing::start_fork_server(arguments);
  if (getpid() != first) {
    read_environment_again();
  }
  std::vector<char*> words{argv[0]};
  for (std::string& argument : arguments) {
    words.push_back(argument.data());
  }
  int count = static_cast<int>(words.size());
  words.push_back(nullptr);
  ::testing::InitGoogleTest(&count, words.data());
  return RUN_ALL_TESTS();
}
