#include "comm/protocol/explorer.h"
#include "comm/shm/errands.h"

#include <cxxabi.h>
#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <unordered_map>
#include <utility>

#include <ucontext.h>

#include <fsdp/error.h>

#include "comm/protocol/watched.h"

namespace fsdp::testing {
namespace {

using shm::Control;
using shm::RankSlot;
using watched::Kind;
using watched::Verdict;

uint64_t mix(uint64_t value, uint64_t with) {
  value = (value ^ with) * 0x9e3779b97f4a7c15;
  return value ^ (value >> 29);
}
uint64_t mix(uint64_t value, const void* with) {
  return mix(value, reinterpret_cast<uint64_t>(with));
}

constexpr int kMostRanks = 4;
std::array<uint8_t, kMostRanks> dead; // what `has_ended` looks at

bool is_of_dead(const void* address) {
  const auto* at = static_cast<const uint8_t*>(address);
  return at >= dead.data() && at < dead.data() + dead.size();
}

struct Region {
  const char* begin;
  size_t bytes;
};

enum class Place { kElsewhere, kQuiet, kBell, kPost, kStep };

// What is where in a group's control segment; the first region that a run makes.
struct ControlMap {
  const char* base = nullptr;

  struct Found {
    int rank = -1;
    size_t offset = 0; // in its slot, or in Control
  };
  Found find(const void* address) const {
    const auto offset = static_cast<size_t>(static_cast<const char*>(address) - base);
    const size_t slots = sizeof(Control);
    if (offset < slots) {
      return {-1, offset};
    }
    return {static_cast<int>((offset - slots) / sizeof(RankSlot)), (offset - slots) % sizeof(RankSlot)};
  }
};

// Offsets by which steps are told apart, and named.
template <typename Field>
size_t offset_of(Field RankSlot::*field) {
  alignas(RankSlot) static char memory[sizeof(RankSlot)];
  const auto* slot = reinterpret_cast<const RankSlot*>(memory);
  return static_cast<size_t>(reinterpret_cast<const char*>(&(slot->*field)) - memory);
}

std::string name_of(size_t offset) {
  static const std::map<size_t, std::string> names{
      {offset_of(&RankSlot::bell), "bell"},
      {offset_of(&RankSlot::wakes_for), "wakes_for"},
      {offset_of(&RankSlot::waits_for), "waits_for"},
      {offset_of(&RankSlot::presence), "presence"},
      {offset_of(&RankSlot::posted), "posted"},
      {offset_of(&RankSlot::finished), "finished"},
      {offset_of(&RankSlot::writing), "writing"},
      {offset_of(&RankSlot::published), "published"},
      {offset_of(&RankSlot::opened), "opened"},
      {offset_of(&RankSlot::closed), "closed"},
      {offset_of(&RankSlot::heard), "heard"},
      {offset_of(&RankSlot::reading), "reading"}};
  const auto found = names.find(offset);
  return found != names.end() ? found->second : "field at " + std::to_string(offset);
}

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
  Kind pending_kind = Kind::kRead;
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
    pending_kind = Kind::kRead;
    history = 0;
    bell = nullptr;
  }
  bool rung() const {
    return bell != nullptr && bell->load() != bell_seen;
  }
};

class Explorer {
 public:
  Explorer(const ExplorerOptions& options, const std::function<void()>& program)
      : options_(options), program_(program) {}

  Explored explore();

  // Called by watched code.
  Verdict before_atomic(const void* address, size_t bytes, Kind kind);
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
  void about_to_access(const void* memory, Kind kind);
  void pause() {
    self().history = mix(self().history, 5);
    about_to_access(nullptr, Kind::kRead);
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
    Kind kind;
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
  bool is_step(const void* address, size_t bytes, Kind kind);
  bool looked_at(const void* address, Kind kind);
  Verdict verdict(const void* address, Kind kind) const;
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

Explorer* active = nullptr;
bool inside = false; // the explorer's own accesses are not watched

struct Inside {
  Inside() : before(std::exchange(inside, true)) {}
  ~Inside() {
    inside = before;
  }
  bool before;
};

Explored Explorer::explore() {
  active = this;
  do {
    learned_ = false;
    seen_.clear();
    path_.clear();
    do {
      run_once();
    } while (result_.violation.empty() && !learned_ && next_path());
  } while (result_.violation.empty() && learned_);
  active = nullptr;
  result_.states = static_cast<int64_t>(seen_.size());
  return result_;
}

bool Explorer::next_path() {
  while (!path_.empty() && ++path_.back().index >= path_.back().moves.size()) {
    path_.pop_back();
  }
  return !path_.empty();
}

// -- fibers

constexpr size_t kStack = 512 << 10;

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
  shm::Errands::of_rank(/*is_thread=*/false); // of this process, so that no rank gets those of the run before
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

void Explorer::violate(const std::string& what) {
  inside = true;
  if (result_.violation.empty()) {
    result_.violation = what + trace();
  }
  std::longjmp(outside_, 1); // what the ranks' stacks hold is lost
}

// -- choosing who goes on

bool Explorer::can_wake(const Fiber& fiber) const {
  return fiber.status == Fiber::Status::kAsleep && fiber.rung();
}

std::vector<int> Explorer::moves() {
  std::vector<int> result, nappers;
  const bool somebody_died = options_.mortal >= 0 && dead[static_cast<size_t>(options_.mortal)];
  for (const auto& fiber : fibers_) {
    const bool asleep = fiber->status == Fiber::Status::kAsleep;
    const bool naps = asleep && (!fiber->napped || fiber->polls);
    if (fiber->status == Fiber::Status::kReady || can_wake(*fiber) ||
        (asleep && !fiber->napped && (somebody_died || fiber->polls))) {
      result.push_back(fiber->rank);
    } else if (naps) {
      nappers.push_back(fiber->rank);
    }
  }
  if (result.empty() && options_.may_fail) {
    result = nappers;
  }
  if (options_.mortal >= 0 && !somebody_died) {
    const auto status = fibers_[static_cast<size_t>(options_.mortal)]->status;
    if (status == Fiber::Status::kReady || status == Fiber::Status::kAsleep) {
      result.push_back(kKill + options_.mortal);
    }
  }
  return result;
}

int Explorer::next() {
  while (mode_ == Mode::kExploring) {
    const std::vector<int> possible = moves();
    if (possible.empty()) {
      for (const auto& fiber : fibers_) {
        if (fiber->status == Fiber::Status::kAsleep) {
          violate("nobody can go on");
        }
      }
      mode_ = Mode::kDraining;
      break;
    }
    const int move = choose(possible);
    if (move < 0) {
      break;
    }
    if (move >= kKill) {
      Fiber& fiber = *fibers_[static_cast<size_t>(move - kKill)];
      trace_.push_back({fiber.rank, nullptr, Kind::kWrite, true});
      dead[static_cast<size_t>(fiber.rank)] = 1;
      fiber.end(Fiber::Status::kDead);
      something_happened();
      continue;
    }
    Fiber& fiber = *fibers_[static_cast<size_t>(move)];
    if (fiber.status == Fiber::Status::kAsleep && !fiber.rung()) {
      fiber.spins = fiber.polls && fiber.napped; // time goes by
      fiber.napped = true;
    }
    trace_.push_back({move, fiber.pending, fiber.pending_kind, false});
    return move;
  }
  return next_without_choice();
}

int Explorer::choose(const std::vector<int>& moves) {
  if (moves.size() == 1) {
    return moves[0];
  }
  if (depth_ < path_.size()) {
    Choice& choice = path_[depth_++];
    if (choice.moves != moves) {
      violate("the same steps led to another state: the program is not deterministic");
    }
    return choice.moves[choice.index];
  }
  const auto [known, is_new] = seen_.emplace(state(), pending_steps());
  if (!is_new) {
    if (known->second != pending_steps()) {
      violate("a rank remembers more than what it read in its operation");
    }
    mode_ = Mode::kDraining;
    return -1;
  }
  path_.push_back({moves, 0});
  ++depth_;
  return moves[0];
}

// Before exploring begins, and after a state that was seen before: to the end, in some order.
int Explorer::next_without_choice() {
  for (const bool asleep : {false, true}) {
    for (const auto& fiber : fibers_) {
      const bool naps = mode_ == Mode::kDraining && asleep && fiber->status == Fiber::Status::kAsleep &&
                        (!fiber->napped || fiber->polls);
      if (fiber->status == Fiber::Status::kReady || can_wake(*fiber) || naps) {
        fiber->spins = naps && fiber->napped;
        fiber->napped = naps;
        return fiber->rank;
      }
    }
  }
  if (mode_ == Mode::kSettingUp) {
    violate("nobody can go on before the exploration begins");
  }
  for (const auto& fiber : fibers_) {
    if (fiber->status == Fiber::Status::kDead) { // so that its memory is given back: the others have gone
      fiber->status = Fiber::Status::kReady;
      return fiber->rank;
    }
  }
  return -1;
}

void Explorer::something_happened() {
  for (const auto& fiber : fibers_) {
    fiber->napped = false;
  }
}

// -- states

uint64_t value_at(const void* address, size_t bytes) {
  uint64_t value = 0;
  std::memcpy(&value, address, bytes);
  return value;
}

uint64_t Explorer::state() const {
  uint64_t hash = 1;
  for (const void* address : contended_) {
    hash = mix(hash, value_at(address, cells_.at(address).bytes));
  }
  for (const auto& fiber : fibers_) {
    hash = mix(hash, fiber->history);
    hash = mix(hash, static_cast<uint64_t>(fiber->status) * 8 + (fiber->rung() ? 4 : 0) + (fiber->napped ? 2 : 0));
    const auto* control = reinterpret_cast<const Control*>(control_.base);
    hash = mix(hash, static_cast<uint64_t>(control->ranks[fiber->rank].wakes_for.load()));
  }
  return hash;
}

uint64_t Explorer::pending_steps() const {
  uint64_t hash = 1;
  for (const auto& fiber : fibers_) {
    hash = mix(mix(hash, fiber->pending), static_cast<uint64_t>(fiber->pending_kind));
  }
  return hash;
}

std::string Explorer::describe(const Trace& step) const {
  std::string who = "rank " + std::to_string(step.rank);
  if (step.kill) {
    return who + " dies";
  }
  if (step.address == nullptr) {
    return who + " goes on";
  }
  const std::string what = step.kind == Kind::kRead ? " reads " : " writes ";
  const auto* at = static_cast<const char*>(step.address);
  if (is_of_dead(at)) {
    return who + " looks whether rank " + std::to_string(reinterpret_cast<const uint8_t*>(at) - dead.data()) + " lives";
  }
  if (!regions_.empty() && at >= control_.base && at < control_.base + regions_[0].bytes) {
    const auto found = control_.find(at);
    return who + what +
           (found.rank < 0 ? found.offset == 0 ? "the failure" : "the reason"
                           : name_of(found.offset) + " of rank " + std::to_string(found.rank));
  }
  for (size_t i = 1; i < regions_.size(); ++i) {
    if (at >= regions_[i].begin && at < regions_[i].begin + regions_[i].bytes) {
      return who + what + "segment " + std::to_string(i) + " at " + std::to_string(at - regions_[i].begin);
    }
  }
  return who + what + "elsewhere";
}

std::string Explorer::trace() const {
  std::ostringstream out;
  out << "\nafter these steps:";
  for (const Trace& step : trace_) {
    out << "\n  " << describe(step);
  }
  out << "\nwhile";
  for (const auto& fiber : fibers_) {
    const bool asleep = fiber->status == Fiber::Status::kAsleep;
    out << "\n  " << describe({fiber->rank, fiber->pending, fiber->pending_kind, false})
        << (fiber->status == Fiber::Status::kDone   ? " and has ended"
            : fiber->status == Fiber::Status::kDead ? " and is dead"
            : asleep                                ? " and sleeps"
                                                    : "");
  }
  return out.str();
}

// -- accesses

Place Explorer::place_of(const void* address) const {
  const auto* at = static_cast<const char*>(address);
  if (is_of_dead(address)) {
    return Place::kStep;
  }
  for (size_t i = 0; i < regions_.size(); ++i) {
    if (at < regions_[i].begin || at >= regions_[i].begin + regions_[i].bytes) {
      continue;
    }
    if (i > 0) {
      return Place::kStep;
    }
    const auto found = control_.find(at);
    if (found.rank < 0) {
      return found.offset < offsetof(Control, reason) ? Place::kStep : Place::kQuiet;
    }
    if (found.offset >= offset_of(&RankSlot::posts)) {
      return Place::kPost;
    }
    if (found.offset >= offset_of(&RankSlot::doing)) {
      return Place::kQuiet; // words for people
    }
    if (found.offset == offset_of(&RankSlot::heard)) {
      return Place::kElsewhere; // counts rings, as the bell does
    }
    if (found.offset == offset_of(&RankSlot::bell)) {
      return Place::kBell;
    }
    const bool of_sleep =
        found.offset == offset_of(&RankSlot::wakes_for) || found.offset == offset_of(&RankSlot::waits_for);
    return of_sleep && !options_.wake_ups ? Place::kQuiet : Place::kStep;
  }
  return Place::kElsewhere;
}

// A rank that reads what only it writes meets nobody.
bool Explorer::is_step(const void* address, size_t bytes, Kind kind) {
  Cell& cell = cells_[address];
  const unsigned me = 1U << self().rank;
  cell.bytes = std::max(cell.bytes, std::min(bytes, sizeof(uint64_t)));
  (kind == Kind::kRead ? cell.readers : cell.writers) |= me;
  const unsigned users = cell.readers | cell.writers;
  if (is_of_dead(address) || (cell.writers != 0 && (users & (users - 1)) != 0)) {
    learned_ = contended_.insert(address).second || learned_;
    return kind == Kind::kWrite || cell.writers != me;
  }
  return false;
}

Verdict Explorer::verdict(const void* address, Kind kind) const {
  const Mistake& mistake = options_.mistake;
  const Fiber& fiber = *fibers_[static_cast<size_t>(current_)];
  if (mistake.kind == Mistake::Kind::kNone || fiber.rank != mistake.rank || mode_ != Mode::kExploring) {
    return Verdict::kAsWritten;
  }
  const auto found = control_.find(address);
  if (mistake.kind == Mistake::Kind::kSleepsUnannounced) {
    const bool says_so = kind == Kind::kWrite && found.offset == offset_of(&RankSlot::wakes_for);
    return says_so ? Verdict::kDrop : Verdict::kAsWritten;
  }
  if (mistake.counter == nullptr || found.rank < 0 || found.offset != offset_of(mistake.counter)) {
    return Verdict::kAsWritten;
  }
  if (mistake.kind == Mistake::Kind::kNeverSet && kind == Kind::kWrite && found.rank == fiber.rank) {
    return Verdict::kDrop;
  }
  const bool of_other = found.rank != fiber.rank && found.rank < options_.ranks;
  return mistake.kind == Mistake::Kind::kNotAwaited && kind == Kind::kRead && of_other ? Verdict::kReadMost
                                                                                       : Verdict::kAsWritten;
}

bool Explorer::looked_at(const void* address, Kind kind) {
  auto& before = self().looked_at;
  if (kind == Kind::kWrite || options_.wake_ups) {
    before.clear();
    return false;
  }
  if (std::find(before.begin(), before.end(), address) != before.end()) {
    return true;
  }
  before.push_back(address);
  return false;
}

Verdict Explorer::before_atomic(const void* address, size_t bytes, Kind kind) {
  const bool looks_again = (self().spins || self().roused) && kind == Kind::kRead;
  if (mode_ != Mode::kExploring || (self().spins && kind == Kind::kRead) || place_of(address) != Place::kStep) {
    return Verdict::kAsWritten;
  }
  if (is_step(address, bytes, kind) && !looks_again && !looked_at(address, kind)) {
    about_to_access(address, kind);
  }
  return verdict(address, kind);
}

void Explorer::about_to_access(const void* memory, Kind kind) {
  if (mode_ != Mode::kExploring) {
    return;
  }
  self().pending = memory;
  self().pending_kind = kind;
  yield();
}

void Explorer::after_read(const void* address, uint64_t value) {
  Fiber& fiber = self();
  if (fiber.spins) {
    const auto found = control_.find(address);
    if (found.offset != offset_of(&RankSlot::bell)) {
      return;
    }
  }
  const Place place = place_of(address);
  if (place == Place::kBell) {
    const auto* bell = static_cast<const std::atomic<uint32_t>*>(address);
    if (control_.find(address).rank == fiber.rank) {
      fiber.bell = bell;
      fiber.bell_seen = static_cast<uint32_t>(value);
    }
    return;
  }
  if (place == Place::kStep) {
    fiber.before_read = fiber.history;
    fiber.last_read = mix(mix(7, address), value);
    if (contended_.count(address) != 0) {
      fiber.history = mix(fiber.history, fiber.last_read);
    }
  }
}

bool Explorer::sees_end_of(int rank) {
  const void* address = &dead[static_cast<size_t>(rank)];
  before_atomic(address, 1, Kind::kRead);
  const bool ignored = options_.mistake.kind == Mistake::Kind::kDeathIgnored;
  const bool ended = !ignored && dead[static_cast<size_t>(rank)] != 0;
  after_read(address, ended);
  return ended;
}

void Explorer::after_write(const void* address, uint64_t value) {
  const Place place = place_of(address);
  Fiber& fiber = self();
  if (place == Place::kElsewhere || place == Place::kBell) {
    return;
  }
  fiber.spins = false;
  const auto found = control_.find(address);
  const bool falls_asleep = found.rank == fiber.rank && found.offset == offset_of(&RankSlot::wakes_for);
  if (place == Place::kStep) {
    fiber.history = mix(mix(fiber.history, address), 3);
    fiber.awaits = fiber.awaits && falls_asleep; // else it has done more than to wait
    if (contended_.count(address) != 0) {
      something_happened();
    }
  }
  if (falls_asleep && !options_.wake_ups) {
    fiber.roused = value != static_cast<uint32_t>(RankSlot::kNobody);
    if (fiber.awaits && !fiber.roused) { // however the wait went, only what was seen at its end is known
      fiber.history = mix(fiber.before_await, fiber.last_read);
      fiber.awaits = false;
      fiber.bell = nullptr;
    }
  }
  fiber.after_store = fiber.history;
}

void Explorer::before_plain_write(const void* address) {
  const Mistake& mistake = options_.mistake;
  if (mistake.kind != Mistake::Kind::kSetTooEarly || mode_ != Mode::kExploring || self().rank != mistake.rank) {
    return;
  }
  Fiber& fiber = self();
  if (place_of(address) == Place::kPost && !std::exchange(fiber.posts, true)) {
    const auto* control = reinterpret_cast<const Control*>(control_.base);
    auto& counter = const_cast<Control*>(control)->ranks[fiber.rank].*mistake.counter;
    about_to_access(&counter, Kind::kWrite);
    counter.fetch_add(1);
    pause();
  }
}

void Explorer::relax() {
  Fiber& fiber = self();
  if (!fiber.spins && !fiber.awaits && !fiber.keeps_all) {
    fiber.before_await = fiber.before_read;
    fiber.awaits = true;
  }
  fiber.spins = true;
}

void Explorer::sleep(const std::atomic<uint32_t>& word, uint32_t seen) {
  Fiber& fiber = self();
  fiber.bell = &word;
  fiber.bell_seen = seen;
  fiber.history = fiber.keeps_all ? fiber.history : fiber.after_store;
  fiber.looked_at.clear();
  if (mode_ == Mode::kExploring) {
    fiber.pending = &word;
    fiber.pending_kind = Kind::kRead;
  }
  fiber.status = Fiber::Status::kAsleep;
  yield();
}

// Looks again after a while, as long as nothing has happened without end.
void Explorer::nap() {
  Fiber& fiber = self();
  if (fiber.spins) {
    constexpr int kEnough = 10'000;
    if (++fiber.idle > kEnough) {
      violate("rank " + std::to_string(fiber.rank) + " looks for something without end");
    }
    return;
  }
  fiber.history = mix(fiber.after_store, 13);
  fiber.bell = nullptr;
  fiber.polls = true;
  fiber.pending = nullptr;
  fiber.status = Fiber::Status::kAsleep;
  yield();
  fiber.polls = false;
}

// -- programs

std::vector<std::string> Explorer::exchange(const std::string& mine) {
  words_[static_cast<size_t>(current_)] = mine;
  meet();
  return all_words_;
}

void Explorer::meet() {
  if (++met_ < options_.ranks) {
    self().status = Fiber::Status::kMeeting;
    yield();
    return;
  }
  met_ = 0;
  all_words_ = words_;
  for (const auto& fiber : fibers_) {
    fiber->status = Fiber::Status::kReady;
  }
  if (std::exchange(starting_, false)) {
    mode_ = Mode::kExploring;
    for (const auto& fiber : fibers_) {
      fiber->history = fiber->after_store = 0;
      fiber->pending = nullptr;
    }
  }
}

void Explorer::start() {
  starting_ = true;
  meet();
  if (mode_ == Mode::kExploring && !std::exchange(started_, true)) { // the others have waited
    yield();
  }
}

void Explorer::operation(bool on_its_way) {
  Fiber& fiber = self();
  fiber.history = fiber.after_store = mix(on_its_way ? fiber.history : 0, ++fiber.operations);
  fiber.looked_at.clear();
  fiber.keeps_all = on_its_way;
  fiber.awaits = fiber.spins = fiber.roused = fiber.posts = false;
  fiber.bell = nullptr;
}

bool watching(const void* address) {
  return active != nullptr && !inside && active->in_fiber() && active->may_be_shared(address);
}

} // namespace

namespace watched {

Verdict before_atomic(const void* address, size_t bytes, Kind kind) {
  if (!watching(address)) {
    return Verdict::kAsWritten;
  }
  const Inside guard;
  return active->before_atomic(address, bytes, kind);
}
void after_read(const void* address, uint64_t value) {
  if (watching(address)) {
    const Inside guard;
    active->after_read(address, value);
  }
}
void after_write(const void* address, uint64_t value) {
  if (watching(address)) {
    const Inside guard;
    active->after_write(address, value);
  }
}
void before_plain_write(const void* address) {
  if (active != nullptr && active->plants_early_writes() && watching(address)) {
    const Inside guard;
    active->before_plain_write(address);
  }
}
void sleep(const std::atomic<uint32_t>& word, uint32_t seen) {
  const Inside guard;
  active->sleep(word, seen);
}
void relax() {
  const Inside guard;
  active->relax();
}
void nap() {
  const Inside guard;
  active->nap();
}
int rank() {
  return active != nullptr && active->in_fiber() ? active->self().rank : -1;
}
bool sees_end_of(int rank) {
  const Inside guard;
  return active->sees_end_of(rank);
}
void add_region(const char* begin, size_t bytes) {
  const Inside guard;
  active->add_region(begin, bytes);
}

} // namespace watched

Explored explore(const ExplorerOptions& options, const std::function<void()>& program) {
  return Explorer(options, program).explore();
}

namespace exploring {

int rank() {
  return active->self().rank;
}
int ranks() {
  return active->ranks();
}
std::vector<std::string> exchange(const std::string& mine) {
  const Inside guard;
  return active->exchange(mine);
}
void start() {
  const Inside guard;
  active->start();
}
void operation(bool on_its_way) {
  const Inside guard;
  active->operation(on_its_way);
}
void pause() {
  const Inside guard;
  active->pause();
}
void violate(const std::string& what) {
  const Inside guard;
  active->violate(what);
}

} // namespace exploring
} // namespace fsdp::testing
