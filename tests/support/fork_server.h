#pragma once

#include <map>
#include <string>
#include <vector>

#include <sys/types.h>

/// Starts further processes of a test program without loading it anew, which for LibTorch takes a quarter of a second:
/// they are forked by a process that `main` forked before it did anything else.
namespace fsdp::testing {

struct ChildStart {
  std::vector<std::string> arguments; ///< without the program's name
  std::map<std::string, std::string> environment; ///< besides what the caller has
  int output; ///< a file's descriptor
};

/// To be called first in `main`. Returns in the program itself; and, with other arguments, in each process that it
/// starts later.
void start_fork_server(std::vector<std::string>& arguments);

/// The new process is a child of the caller, and is killed with it.
pid_t start_child(const ChildStart& start);

} // namespace fsdp::testing
