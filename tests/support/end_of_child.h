#pragma once

#include <cstdio>
#include <exception>
#include <string>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace fsdp::testing {

struct EndOfChild {
  int status = 0; ///< as waitpid gives it
  std::string said; ///< on its standard error
};

/// How a forked child ends that runs `body`, which may return, throw, or end it.
template <typename Body>
EndOfChild end_of_child(const Body& body) {
  std::FILE* const said = std::tmpfile();
  const pid_t child = fork();
  if (child == 0) {
    dup2(fileno(said), STDERR_FILENO);
    alarm(60); // a child that hangs is a failure
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      _exit(1);
    }
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  EndOfChild end;
  waitpid(child, &end.status, 0);
  std::rewind(said);
  for (int letter = std::fgetc(said); letter != EOF; letter = std::fgetc(said)) {
    end.said += static_cast<char>(letter);
  }
  std::fclose(said);
  return end;
}

} // namespace fsdp::testing
