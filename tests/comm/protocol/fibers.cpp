#include "comm/protocol/exploration.h"

#include <cxxabi.h>
#include <csetjmp>
#include <cstring>
#include <exception>

#include <ucontext.h>

#include <fsdp/error.h>

#include "comm/errands.h"

namespace fsdp::testing {

namespace {
constexpr size_t kStack = 512 << 10;
} // namespace

void Explorer::enter(unsigned high, unsigned low) {
  auto* fiber = reinterpret_cast<Fiber*>((static_cast<uint64_t>(high) << 32) | low);
  inside = false;
  active->body(*fiber);
}

void Explorer::body(Fiber& fiber) {
  std::string error;
  try {
    program_();
  } catch (const CommError& failure) {
    inside = true;
    ++result_.errors;
    error = options_.may_fail ? "" : failure.what();
  } catch (const std::exception& failure) {
    inside = true;
    error = failure.what();
  }
  inside = true;
  if (!error.empty()) {
    violate("rank " + std::to_string(fiber.rank) + " threw: " + error);
  }
  fiber.end(Fiber::Status::kDone);
  something_happened();
  const int rank = next();
  if (rank >= 0) {
    switch_to(rank);
  }
  std::longjmp(outside_, 1);
}

void Explorer::run_once() {
  Errands::of_rank(/*is_thread=*/false); // of this process, so that no rank gets those of the run before
  ++result_.runs;
  mode_ = Mode::kSettingUp;
  fibers_.resize(static_cast<size_t>(options_.ranks));
  regions_.clear();
  begin_ = reinterpret_cast<const char*>(UINTPTR_MAX);
  end_ = nullptr;
  trace_.clear();
  words_.assign(fibers_.size(), "");
  met_ = 0;
  starting_ = started_ = false;
  depth_ = 0;
  dead.fill(0);
  for (int r = 0; r < options_.ranks; ++r) {
    auto& fiber = fibers_[static_cast<size_t>(r)];
    auto stack = fiber ? std::move(fiber->stack) : std::make_unique<char[]>(kStack);
    fiber = std::make_unique<Fiber>();
    fiber->rank = r;
    fiber->stack = std::move(stack);
    getcontext(&fiber->first);
    fiber->first.uc_stack.ss_sp = fiber->stack.get();
    fiber->first.uc_stack.ss_size = kStack;
    const auto address = reinterpret_cast<uint64_t>(fiber.get());
    makecontext(
        &fiber->first,
        reinterpret_cast<void (*)()>(&Explorer::enter),
        2,
        static_cast<unsigned>(address >> 32),
        static_cast<unsigned>(address));
  }
  auto* exceptions = abi::__cxa_get_globals();
  char kept[sizeof(Fiber::exceptions)];
  std::memcpy(kept, exceptions, sizeof(kept));
  if (_setjmp(outside_) == 0) {
    switch_to(0);
  }
  std::memcpy(abi::__cxa_get_globals(), kept, sizeof(kept));
  current_ = -1;
  inside = false;
}

void Explorer::switch_to(int rank) {
  if (rank == current_) {
    return;
  }
  auto* exceptions = abi::__cxa_get_globals();
  if (current_ >= 0) {
    Fiber& from = self();
    std::memcpy(&from.exceptions, exceptions, sizeof(from.exceptions));
    if (_setjmp(from.place) != 0) {
      return;
    }
  }
  current_ = rank;
  Fiber& to = self();
  std::memcpy(exceptions, &to.exceptions, sizeof(to.exceptions));
  if (std::exchange(to.begun, true)) {
    _longjmp(to.place, 1);
  }
  setcontext(&to.first);
}

void Explorer::yield() {
  const int rank = next();
  if (rank < 0) {
    std::longjmp(outside_, 1);
  }
  switch_to(rank);
  self().status = Fiber::Status::kReady;
}

} // namespace fsdp::testing
