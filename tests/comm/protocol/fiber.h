#pragma once

#include <atomic>
#include <csetjmp>
#include <cstdint>
#include <memory>
#include <vector>

#include <ucontext.h>

#include "comm/protocol/watched.h"

namespace fsdp::testing {

/// A rank that is explored: its stack, and what is known of it.
struct Fiber {
  enum class Status { kReady, kAsleep, kMeeting, kDead, kDone };

  int rank = 0;
  Status status = Status::kReady;
  ucontext_t first{};
  jmp_buf place{};
  bool begun = false;
  std::unique_ptr<char[]> stack;
  struct {
    void* caught;
    unsigned uncaught;
  } exceptions{}; // those in flight belong to a stack

  const void* pending = nullptr; // the access it is about to make
  watched::Kind pending_kind = watched::Kind::kRead;
  uint64_t history = 0; // what it has read since its operation began
  uint64_t before_read = 0, after_store = 0, before_await = 0; // former values
  bool keeps_all = false; // what it reads tells it about operations that are on their way
  bool awaits = false; // between a first look and the end of the wait
  uint64_t last_read = 0;
  bool spins = false; // looks again at what cannot have changed
  std::vector<const void*> looked_at; // since it changed something; looking again is no step
  bool roused = false; // looks whether to go on or to sleep: one step, but where wake-ups are explored
  uint64_t operations = 0;
  const std::atomic<uint32_t>* bell = nullptr;
  uint32_t bell_seen = 0;
  bool polls = false; // sleeps for a time, whatever the bell
  bool napped = false; // and nothing has happened since
  int idle = 0; // looks in vain
  bool posts = false; // set too early: see Mistake

  void end(Status as) {
    status = as;
    pending = nullptr;
    pending_kind = watched::Kind::kRead;
    history = 0;
    bell = nullptr;
  }
  bool rung() const {
    return bell != nullptr && bell->load() != bell_seen;
  }
};

} // namespace fsdp::testing
