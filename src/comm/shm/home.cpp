#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/ops/from_blob.h>

#include "base/caller.h"
#include "base/check.h"
#include "comm/arguments.h"
#include "comm/shm/arena.h"
#include "comm/shm/core.h"
#include "comm/shm/packed.h"
#include "comm/shm/whole.h"

namespace fsdp::shm {
namespace {

size_t bytes_of(int64_t count, c10::ScalarType dtype) {
  return static_cast<size_t>(count) * c10::elementSize(dtype);
}

// Where the pieces lie: whole pieces one after another, in the home's segment and, if cast, in scratch.
struct Layout {
  Layout(const std::vector<Piece>& pieces, bool rewritten) {
    for (const Piece& piece : pieces) {
      in_place.push_back(piece.stored == piece.gathered && !rewritten);
      stored.push_back(stored_bytes);
      stored_bytes += whole_lines(bytes_of(piece.numel, piece.stored));
      cast.push_back(cast_bytes);
      cast_bytes += in_place.back() ? 0 : whole_lines(bytes_of(piece.numel, piece.gathered));
      any_in_place = any_in_place || in_place.back();
      any_cast = any_cast || !in_place.back();
    }
  }

  std::vector<bool> in_place; // read where they are stored; else from a copy, of the gathered dtype
  std::vector<size_t> stored; // offsets
  std::vector<size_t> cast;
  size_t stored_bytes = 0;
  size_t cast_bytes = 0;
  bool any_in_place = false;
  bool any_cast = false;
};

// What a home and what was gathered from it have in common; it outlives both.
struct HomeState {
  HomeState(CorePointer core_, std::vector<Piece> pieces_, bool rewritten)
      : core(std::move(core_)), pieces(std::move(pieces_)), layout(pieces, rewritten) {
    ++core->homes;
  }
  ~HomeState() {
    for (size_t i = 0; segment && i < pieces.size(); ++i) {
      core->unseen_writes.forget(slice(i));
    }
    if (--core->homes == 0 && core->keeps_arena.exchange(false)) {
      Arena::of_process().stop_keeping();
    }
  }
  HomeState(const HomeState&) = delete;
  HomeState& operator=(const HomeState&) = delete;

  void watch_slices() {
    for (size_t i = 0; i < pieces.size(); ++i) {
      const size_t bytes = bytes_of(pieces[i].length(core->members->rank()), pieces[i].stored);
      core->unseen_writes.watch(slice(i), layout.in_place[i] ? bytes : 0);
    }
  }
  char* slice(size_t index) const {
    const Piece& piece = pieces[index];
    return segment->writable() + layout.stored[index] + bytes_of(piece.begin(core->members->rank()), piece.stored);
  }

  CorePointer core;
  std::vector<Piece> pieces;
  Layout layout;
  std::shared_ptr<Segment> segment;
  std::shared_ptr<Scratch> scratch; // null if nothing is cast
  bool was_gathered = false;
};
using StatePointer = std::shared_ptr<HomeState>;

class GatheredPieces final : public Gathered {
 public:
  GatheredPieces(StatePointer state, const Label& label) : state_(std::move(state)), label_(label) {
    Core& core = *state_->core;
    core.members->begin(label_);
    core.collectives.release_kept();
    if (state_->layout.any_in_place) {
      core.phases.publish_writes();
      core.unseen_writes.before_gather();
    }
    if (state_->layout.any_cast) {
      cast();
    }
  }

  ~GatheredPieces() override {
    if (region_ && !state_->core->members->inherited()) {
      state_->scratch->release(*region_);
    }
  }

  void abandon() override {
    if (const auto region = std::exchange(region_, std::nullopt)) {
      state_->scratch->abandon(*region);
    }
  }

  void wait() override {
    Core& core = *state_->core;
    core.members->throw_if_failed(label_); // also in a forked child
    if (state_->layout.any_in_place) {
      core.phases.await_readable(label_);
      core.unseen_writes.await_others(label_);
    }
    if (arrival_) {
      core.collectives.finish(arrival_);
    }
    core.members->throw_if_failed(label_);
  }

  void* piece(size_t index) const override {
    const Layout& layout = state_->layout;
    const char* memory = layout.in_place[index] ? state_->segment->readable() + layout.stored[index]
                                                : state_->scratch->readable(*region_) + layout.cast[index];
    return const_cast<char*>(memory); // mapped for reading only
  }

  int64_t bytes() const override {
    const int64_t size = state_->core->members->size();
    return (static_cast<int64_t>(state_->layout.cast_bytes) + size - 1) / size; // the ranks share it
  }

 private:
  // Every rank converts its slice of each piece, once, into the region that all ranks chose alike.
  void cast() {
    Core& core = *state_->core;
    Scratch& scratch = *state_->scratch;
    region_ = scratch.take(std::max<size_t>(1, state_->layout.cast_bytes));
    scratch.await_free(*region_, label_);
    for (size_t i = 0; i < state_->pieces.size(); ++i) {
      if (!state_->layout.in_place[i]) {
        cast_slice(i);
      }
    }
    core.collectives.prepare(label_, Fingerprint("gather", label_, scratch.history()));
    const uint64_t number = core.collectives.commit();
    arrival_ = core.collectives.queue({.number = number, .value = number});
  }

  void cast_slice(size_t index) const {
    const Piece& piece = state_->pieces[index];
    const int rank = state_->core->members->rank();
    if (piece.length(rank) == 0) {
      return;
    }
    char* target =
        state_->scratch->writable(*region_) + state_->layout.cast[index] + bytes_of(piece.begin(rank), piece.gathered);
    at::from_blob(target, {piece.length(rank)}, piece.gathered)
        .copy_(at::from_blob(state_->slice(index), {piece.length(rank)}, piece.stored));
  }

  StatePointer state_;
  Label label_;
  std::optional<Scratch::Region> region_; // if something is cast
  Collectives::StepPointer arrival_;
};

class SharedHome final : public Home {
 public:
  explicit SharedHome(StatePointer state) : state_(std::move(state)) {}

  void* slice(size_t index) const override {
    return state_->slice(index);
  }

  // Slices that are cast are read by their own rank only.
  void begin_write(const Label& label) override {
    Core& core = *state_->core;
    core.members->throw_if_failed(label);
    if (state_->layout.any_in_place && !core.phases.writing()) {
      const WithoutCallersLock no_callers_lock;
      core.unseen_writes.end();
      core.phases.begin_write(label);
      core.collectives.release_kept(); // the others have read all that was given to them
    }
  }

  std::unique_ptr<Gathered> gather(const Label& label) override {
    if (std::exchange(state_->was_gathered, true)) { // else it is being sharded
      keep_arena();
    }
    return std::make_unique<GatheredPieces>(state_, label);
  }

 private:
  // From the first step on.
  void keep_arena() {
    Core& core = *state_->core;
    if (!core.keeps_arena && !core.members->one_process() && !core.keeps_arena.exchange(true)) {
      Arena::of_process().serve_tensors();
      Arena::of_process().start_keeping();
    }
  }

  StatePointer state_;
};

void check(const std::vector<Piece>& pieces, const HomeOptions& options, int size, const Label& label) {
  FSDP_CHECK(
      options.device.is_cpu(),
      "[{}] the shared-memory group holds parameters on the CPU, asked for {}; use the backend of that device",
      label.operation,
      options.device.str());
  check_pieces(pieces, size, label);
}

uint64_t fingerprint(const std::vector<Piece>& pieces) {
  Fingerprint print("pieces", {"", ""});
  for (const Piece& piece : pieces) {
    print.add(piece.numel, piece.chunk, piece.stored, piece.gathered);
  }
  return print.value();
}

// Where all find what rank 0 has made. Plain data.
struct Offer {
  SegmentId home;
  SegmentId scratch; // if there has to be a new one
};

// What is `made` stays there until all have opened it.
Offer make_offer(const Layout& layout, bool new_scratch, int size, std::vector<std::shared_ptr<Segment>>& made) {
  made.push_back(Segment::create("fsdp-home", std::max<size_t>(4096, layout.stored_bytes), Access::kReadAndWrite));
  Offer offer{made.back()->id(), {}};
  if (new_scratch) {
    made.push_back(Scratch::make_segment(size));
    offer.scratch = made.back()->id();
  }
  return offer;
}

void open_offer(HomeState& state, const Offer& offer, bool new_scratch) {
  state.segment = Segment::open(offer.home, Access::kReadAndWrite);
  state.watch_slices();
  if (new_scratch) {
    state.scratch =
        std::make_shared<Scratch>(*state.core->members, Segment::open(offer.scratch, Access::kReadAndWrite));
    state.core->scratch = state.scratch;
  }
}

// Whether the ranks need a new scratch: homes are not destroyed at one moment everywhere, so some may have none any
// more.
bool agree_on_scratch(HomeState& state, const Label& label) {
  state.scratch = state.layout.any_cast ? state.core->scratch.lock() : nullptr;
  const std::string mine = state.scratch ? packed(state.scratch->id()) + std::to_string(state.scratch->history()) : "";
  const auto all = exchange(state.core, mine, label, fingerprint(state.pieces));
  const bool same = std::all_of(all.begin(), all.end(), [&](const std::string& other) { return other == all[0]; });
  if (!same || !state.scratch) {
    return state.layout.any_cast;
  }
  state.scratch->reclaim(exchange(state.core, state.scratch->abandoned(), label));
  return false;
}

} // namespace

std::shared_ptr<Home> make_home(
    const CorePointer& core, std::vector<Piece> pieces, const HomeOptions& options, const Label& label) {
  check(pieces, options, core->members->size(), label);
  auto state = std::make_shared<HomeState>(core, std::move(pieces), options.rewritten);
  const bool new_scratch = agree_on_scratch(*state, label);
  Offer offer;
  std::vector<std::shared_ptr<Segment>> made;
  std::string complaint = complaint_of([&] {
    if (core->members->rank() == 0) {
      offer = make_offer(state->layout, new_scratch, core->members->size(), made);
    }
  });
  const std::string offered = exchange(core, packed(offer), label)[0];
  if (complaint.empty()) {
    complaint = complaint_of([&] { open_offer(*state, unpacked<Offer>(offered), new_scratch); });
  }
  agree(exchange(core, complaint, label));
  for (const auto& segment : made) {
    segment->hide();
  }
  // It is written now, and nobody needs to be waited for: nobody reads what is just made.
  if (state->layout.any_in_place && !core->phases.writing()) {
    core->phases.resume(/*all_were_writing=*/true);
  }
  return std::make_shared<SharedHome>(std::move(state));
}

} // namespace fsdp::shm
