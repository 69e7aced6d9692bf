#pragma once

#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sys/wait.h>

#include "support/fork_server.h"

namespace fsdp::testing {

/// A process that a test started, with its output kept in a nameless file. Killed when it goes out of scope.
class ChildProcess {
 public:
  /// Runs this very program again, with more environment variables.
  ChildProcess(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& environment)
      : output_(std::tmpfile()), pid_(start_child({arguments, environment, fileno(output_)})) {}
  ~ChildProcess() {
    end();
    std::fclose(output_);
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const {
    return pid_;
  }

  /// Whether it has ended.
  bool ended() {
    if (!status_) {
      int status = 0;
      if (waitpid(pid_, &status, WNOHANG) == pid_) {
        status_ = status;
      }
    }
    return status_.has_value();
  }

  /// Kills it unless it has ended; stopped processes too.
  void end() {
    if (!ended()) {
      kill(pid_, SIGKILL);
      int status = 0;
      waitpid(pid_, &status, 0);
      status_ = status;
    }
  }

  bool succeeded() const {
    return status_ && WIFEXITED(*status_) && WEXITSTATUS(*status_) == 0;
  }

  std::string fate() const {
    if (!status_) {
      return "still runs";
    }
    return WIFSIGNALED(*status_) ? "was ended by signal " + std::to_string(WTERMSIG(*status_))
                                 : "ended with status " + std::to_string(WEXITSTATUS(*status_));
  }

  std::string output() const {
    std::string text;
    std::rewind(output_);
    char part[4096];
    while (const size_t count = std::fread(part, 1, sizeof(part), output_)) {
      text.append(part, count);
    }
    return text;
  }

 private:
  std::FILE* output_;
  pid_t pid_;
  std::optional<int> status_;
};

} // namespace fsdp::testing
