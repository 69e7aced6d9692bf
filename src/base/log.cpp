#include "base/log.h"

#include <array>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <unordered_set>

#include <fsdp/error.h>

#include "base/env.h"

namespace fsdp::log {
namespace {

constexpr int kNoRank = -1;
constexpr std::array kLevelNames = {"error", "warning", "info", "debug"};

std::atomic<int> process_rank{kNoRank};
thread_local int thread_rank = kNoRank;

Level level_from_environment() {
  try {
    auto choice = env::choice("FSDP_LOG", {"error", "warn", "info", "debug"});
    return choice ? static_cast<Level>(*choice) : Level::kWarn;
  } catch (const Error& malformed) {
    write(Level::kWarn, malformed.what());
    return Level::kWarn;
  }
}

std::atomic<Level>& current_level() {
  static std::atomic<Level> level{level_from_environment()};
  return level;
}

// Of a process that has not joined a job (yet), or whose job the Python program joined.
int rank_from_environment() {
  static const int rank = [] {
    try {
      return static_cast<int>(env::integer("RANK", 0).value_or(kNoRank));
    } catch (const Error&) {
      return kNoRank; // whoever joins the job complains
    }
  }();
  return rank;
}

std::string prefix() {
  const int known = rank();
  return known == kNoRank ? "[libfsdp] " : phrase("[libfsdp rank {}] ", known);
}

} // namespace

void set_level(Level level) {
  current_level().store(level, std::memory_order_relaxed);
}

bool enabled(Level level) {
  return level <= current_level().load(std::memory_order_relaxed);
}

void set_rank(int rank) {
  process_rank.store(rank, std::memory_order_relaxed);
}

void set_thread_rank(int rank) {
  thread_rank = rank;
}

int rank() {
  if (thread_rank != kNoRank) {
    return thread_rank;
  }
  const int known = process_rank.load(std::memory_order_relaxed);
  return known != kNoRank ? known : rank_from_environment();
}

void write(Level level, std::string_view message) {
  std::string line = phrase("{}{}: {}\n", prefix(), kLevelNames[static_cast<size_t>(level)], message);
  // stderr has no buffer, so this is one write: lines of ranks that share a terminal do not mix.
  std::fwrite(line.data(), 1, line.size(), stderr);
}

void warn_once(const std::string& message) {
  // Never destroyed, as what ends at exit may warn.
  static auto* const mutex = new std::mutex;
  static auto* const written = new std::unordered_set<std::string>;
  {
    std::lock_guard lock(*mutex);
    if (!written->insert(message).second) {
      return;
    }
  }
  warn("{}", message);
}

} // namespace fsdp::log
