#include "comm/shm/left_behind.h"

#include <csignal>
#include <string_view>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/check.h"

namespace fsdp::shm {
namespace {

constexpr std::string_view kReason =
    "[fork] a forked child touched shards, or other memory that the ranks of its parent share; copy what a child needs "
    "before the fork, or start it by spawn\n";

struct sigaction before {}; // what a SIGSEGV did

std::vector<std::pair<const char*, const char*>>& ranges() {
  static auto* ranges = new std::vector<std::pair<const char*, const char*>>; // looked at until the very end
  return *ranges;
}

void on_fault(int signal, siginfo_t* info, void*) {
  const auto* address = static_cast<const char*>(info->si_addr);
  for (const auto& [begin, end] : ranges()) {
    if (info->si_code > 0 && begin <= address && address < end) {
      static_cast<void>(!write(STDERR_FILENO, kReason.data(), kReason.size()));
      break;
    }
  }
  sigaction(signal, &before, nullptr); // to which an access that is tried again leads
  if (info->si_code <= 0) {
    raise(signal); // it was sent
  }
}

} // namespace

void leave_behind(char* memory, size_t bytes) {
  const void* mapped = mmap(memory, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  TORCH_INTERNAL_ASSERT(mapped != MAP_FAILED, "a forked child would share memory with its parent");
  if (ranges().empty()) {
    struct sigaction action {};
    action.sa_sigaction = &on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &before);
  }
  ranges().emplace_back(memory, memory + bytes);
}

} // namespace fsdp::shm
