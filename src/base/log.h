#pragma once

#include <string>
#include <string_view>

#include "base/phrase.h"

/// Lines on stderr: `[libfsdp rank 3] warning: ...`. FSDP_LOG chooses the least important level that is written: error,
/// warn (the default), info or debug. Never throws for a bad FSDP_LOG. Thread safe; a line is written in one piece.
namespace fsdp::log {

enum class Level { kError, kWarn, kInfo, kDebug };

/// What to write from now on. Without a call, what FSDP_LOG says when the first line is due.
void set_level(Level level);
bool enabled(Level level);

/// This process's rank, for the prefix. Before the call, what RANK says.
void set_rank(int rank);
/// The calling thread's rank, else the process's, else what RANK says; -1 if nothing does.
int rank();
/// Where ranks are threads: the calling thread's rank, which goes before the process's; -1 takes it back.
void set_thread_rank(int rank);

/// Writes a line whatever the level. Prefer the functions below.
void write(Level level, std::string_view message);

template <typename... Args>
void error(TextWith<std::type_identity_t<Args>...> text, const Args&... args) {
  if (enabled(Level::kError)) {
    write(Level::kError, phrase<Args...>(text, args...));
  }
}

template <typename... Args>
void warn(TextWith<std::type_identity_t<Args>...> text, const Args&... args) {
  if (enabled(Level::kWarn)) {
    write(Level::kWarn, phrase<Args...>(text, args...));
  }
}

template <typename... Args>
void info(TextWith<std::type_identity_t<Args>...> text, const Args&... args) {
  if (enabled(Level::kInfo)) {
    write(Level::kInfo, phrase<Args...>(text, args...));
  }
}

template <typename... Args>
void debug(TextWith<std::type_identity_t<Args>...> text, const Args&... args) {
  if (enabled(Level::kDebug)) {
    write(Level::kDebug, phrase<Args...>(text, args...));
  }
}

/// A warning that each process writes at most once for the same text.
void warn_once(const std::string& message);

} // namespace fsdp::log
