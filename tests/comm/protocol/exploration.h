#pragma once

#include <algorithm>
#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/protocol/control_map.h"
#include "comm/protocol/explorer.h"
#include "comm/protocol/fiber.h"
#include "comm/protocol/watched.h"

namespace fsdp::testing {

inline uint64_t mix(uint64_t value, uint64_t with) {
  value = (value ^ with) * 0x9e3779b97f4a7c15;
  return value ^ (value >> 29);
}
inline uint64_t mix(uint64_t value, const void* with) {
  return mix(value, reinterpret_cast<uint64_t>(with));
}

/// fibers.cpp switches between ranks, choices.cpp says whose turn it is, accesses.cpp finds the steps, trace.cpp names
/// them.
class Explorer {
 public:
  Explorer(const ExplorerOptions& options, const std::function<void()>& program)
      : options_(options), program_(program) {}

  Explored explore();

  // Called by watched code.
  watched::Verdict before_atomic(const void* address, size_t bytes, watched::Kind kind);
  void after_read(const void* address, uint64_t value);
  void after_write(const void* address, uint64_t value);
  void before_plain_write(const void* address);
  void sleep(const std::atomic<uint32_t>& word, uint32_t seen);
  void relax();
  void nap();
  bool sees_end_of(int rank);
  void add_region(const char* begin, size_t bytes) {
    if (regions_.empty()) {
      control_.base = begin;
    }
    regions_.push_back({begin, bytes});
    begin_ = std::min(begin_, begin);
    end_ = std::max(end_, begin + bytes);
  }
  /// Quick: most memory is no other rank's business.
  bool may_be_shared(const void* address) const {
    const auto* at = static_cast<const char*>(address);
    return at >= begin_ && at < end_;
  }
  bool plants_early_writes() const {
    return options_.mistake.kind == Mistake::Kind::kSetTooEarly;
  }

  // Called by programs.
  Fiber& self() {
    return *fibers_[static_cast<size_t>(current_)];
  }
  int ranks() const {
    return options_.ranks;
  }
  bool in_fiber() const {
    return current_ >= 0;
  }
  std::vector<std::string> exchange(const std::string& mine);
  void start();
  void operation(bool on_its_way);
  void about_to_access(const void* memory, watched::Kind kind);
  void pause() {
    self().history = mix(self().history, 5);
    about_to_access(nullptr, watched::Kind::kRead);
    self().history = self().after_store = mix(self().history, 6);
  }
  [[noreturn]] void violate(const std::string& what);

 private:
  enum class Mode { kSettingUp, kExploring, kDraining };
  struct Cell { // of shared memory
    size_t bytes = 0;
    unsigned readers = 0, writers = 0; // ranks
  };
  struct Choice {
    std::vector<int> moves;
    size_t index = 0;
  };
  struct Trace {
    int rank;
    const void* address;
    watched::Kind kind;
    bool kill;
  };
  static constexpr int kKill = 100; // a move: this rank dies, plus its number

  static void enter(unsigned high, unsigned low);
  void body(Fiber& fiber);
  void run_once();
  bool next_path();
  void switch_to(int rank);
  void yield();
  int next();
  int next_without_choice();
  int choose(const std::vector<int>& moves);
  std::vector<int> moves();
  bool can_wake(const Fiber& fiber) const;
  void meet();
  Place place_of(const void* address) const;
  bool is_step(const void* address, size_t bytes, watched::Kind kind);
  bool looked_at(const void* address, watched::Kind kind);
  watched::Verdict verdict(const void* address, watched::Kind kind) const;
  void something_happened();
  uint64_t state() const;
  uint64_t pending_steps() const;
  std::string describe(const Trace& step) const;
  std::string trace() const;

  const ExplorerOptions& options_;
  const std::function<void()>& program_;

  // Over all runs.
  std::map<const void*, Cell> cells_;
  std::set<const void*> contended_; // cells that one rank writes and another uses
  std::unordered_map<uint64_t, uint64_t> seen_; // states, with what the ranks were about to do
  std::vector<Choice> path_;
  Explored result_;

  // Of one run.
  Mode mode_ = Mode::kSettingUp;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Region> regions_;
  const char* begin_ = nullptr; // of all regions
  const char* end_ = nullptr;
  ControlMap control_;
  std::vector<std::string> words_, all_words_;
  int met_ = 0;
  bool starting_ = false, started_ = false;
  bool learned_ = false; // a cell turned out to be contended: start over
  size_t depth_ = 0;
  std::vector<Trace> trace_;
  int current_ = -1;
  jmp_buf outside_{};
};

inline Explorer* active = nullptr;
inline bool inside = false; // the explorer's own accesses are not watched

struct Inside {
  Inside() : before(std::exchange(inside, true)) {}
  ~Inside() {
    inside = before;
  }
  bool before;
};

} // namespace fsdp::testing
