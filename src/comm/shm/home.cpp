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

// Lives as long as what was gathered from it.
struct SharedHome final : Home, std::enable_shared_from_this<SharedHome> {
  SharedHome(CorePointer core_, std::vector<Piece> pieces_, bool rewritten)
      : core(std::move(core_)),
        pieces(std::move(pieces_)),
        layout(pieces, rewritten),
        keeps_arena(core->keeps_arena.lock()) {}
  ~SharedHome() override {
    const bool ours = segment && !core->members->inherited(); // else a thread of the parent may have held the lock
    for (size_t i = 0; ours && i < pieces.size(); ++i) {
      core->unseen_writes.forget(own_slice(i));
    }
  }
  SharedHome(const SharedHome&) = delete;
  SharedHome& operator=(const SharedHome&) = delete;

  void* slice(size_t index) const override {
    return own_slice(index);
  }
  // Slices that are cast are read by their own rank only.
  void begin_write(const Label& label) override {
    core->members->throw_if_failed(label);
    if (layout.any_in_place && !core->phases.writing()) {
      const WithoutCallersLock no_callers_lock;
      core->unseen_writes.end();
      core->phases.begin_write(label);
      core->collectives.release_kept(); // the others have read all that was given to them
    }
  }
  std::unique_ptr<Gathered> gather(const Label& label) override;

  void watch_slices() {
    for (size_t i = 0; i < pieces.size(); ++i) {
      const size_t bytes = bytes_of(pieces[i].length(core->members->rank()), pieces[i].stored);
      core->unseen_writes.watch(own_slice(i), layout.in_place[i] ? bytes : 0);
    }
  }
  char* own_slice(size_t index) const {
    const Piece& piece = pieces[index];
    return segment->writable() + layout.stored[index] + bytes_of(piece.begin(core->members->rank()), piece.stored);
  }
  // From the first step on: what a step has freed serves the next.
  void keep_arena() {
    if (keeps_arena || core->members->one_process()) {
      return;
    }
    keeps_arena = core->keeps_arena.lock();
    if (!keeps_arena) {
      Arena::of_process().serve_tensors();
      core->keeps_arena = keeps_arena = Arena::of_process().keep_freed();
    }
  }

  CorePointer core;
  std::vector<Piece> pieces;
  Layout layout;
  std::shared_ptr<Segment> segment;
  std::shared_ptr<Scratch> scratch; // null if nothing is cast
  std::shared_ptr<void> keeps_arena; // the same for all homes of the group; new ones take it over from old ones
  bool was_gathered = false;
};

class GatheredPieces final : public Gathered {
 public:
  GatheredPieces(std::shared_ptr<SharedHome> home, const Label& label) : home_(std::move(home)), label_(label) {
    Core& core = *home_->core;
    core.members->begin(label_);
    core.collectives.release_kept();
    core.phases.publish_writes(); // also where all is cast: others may wait to read another home in place
    if (home_->layout.any_in_place && home_->was_gathered) { // else all ranks have met since, and go on together
      look_ = core.unseen_writes.before_gather();
    }
    if (home_->layout.any_cast) {
      cast();
    }
  }

  ~GatheredPieces() override {
    if (region_ && !home_->core->members->inherited()) {
      home_->scratch->release(*region_);
    }
  }

  void abandon() override {
    if (const auto region = std::exchange(region_, std::nullopt); region && !home_->core->members->inherited()) {
      home_->scratch->abandon(*region);
    }
  }

  void wait() override {
    Core& core = *home_->core;
    core.members->throw_if_failed(label_); // also in a forked child
    if (home_->layout.any_in_place) {
      core.phases.await_readable(label_);
      core.unseen_writes.await_others(look_, label_);
    }
    if (arrival_) {
      core.collectives.finish(arrival_);
    }
    core.members->throw_if_failed(label_);
  }

  void* piece(size_t index) const override {
    const Layout& layout = home_->layout;
    const char* memory = layout.in_place[index] ? home_->segment->readable() + layout.stored[index]
                                                : home_->scratch->readable(*region_) + layout.cast[index];
    return const_cast<char*>(memory); // mapped for reading only
  }

  int64_t bytes() const override {
    const int64_t size = home_->core->members->size();
    return (static_cast<int64_t>(home_->layout.cast_bytes) + size - 1) / size; // the ranks share it
  }

 private:
  // Every rank converts its slice of each piece, once, into the region that all ranks chose alike.
  void cast() {
    Core& core = *home_->core;
    Scratch& scratch = *home_->scratch;
    region_ = scratch.take(std::max<size_t>(1, home_->layout.cast_bytes));
    scratch.await_free(*region_, label_);
    for (size_t i = 0; i < home_->pieces.size(); ++i) {
      if (!home_->layout.in_place[i]) {
        cast_slice(i);
      }
    }
    core.collectives.prepare(label_, Fingerprint("gather", label_, scratch.history()));
    const uint64_t number = core.collectives.commit();
    arrival_ = core.collectives.queue({.number = number, .value = number});
  }

  void cast_slice(size_t index) const {
    const Piece& piece = home_->pieces[index];
    const int rank = home_->core->members->rank();
    if (piece.length(rank) == 0) {
      return;
    }
    char* target =
        home_->scratch->writable(*region_) + home_->layout.cast[index] + bytes_of(piece.begin(rank), piece.gathered);
    at::from_blob(target, {piece.length(rank)}, piece.gathered)
        .copy_(at::from_blob(home_->own_slice(index), {piece.length(rank)}, piece.stored));
  }

  std::shared_ptr<SharedHome> home_;
  Label label_;
  uint64_t look_ = 0; // see UnseenWrites
  std::optional<Scratch::Region> region_; // if something is cast
  Collectives::StepPointer arrival_;
};

std::unique_ptr<Gathered> SharedHome::gather(const Label& label) {
  if (was_gathered) { // else it is being sharded, or puts something together once
    keep_arena();
  }
  auto gathered = std::make_unique<GatheredPieces>(shared_from_this(), label);
  if (!std::exchange(was_gathered, true)) {
    watch_slices();
  }
  return gathered;
}

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
  made.push_back(Segment::create("fsdp-home", std::max(kPage, layout.stored_bytes), Access::kReadAndWrite));
  Offer offer{made.back()->id(), {}};
  if (new_scratch) {
    made.push_back(Scratch::make_segment(size));
    offer.scratch = made.back()->id();
  }
  return offer;
}

void open_offer(SharedHome& home, const Offer& offer, bool new_scratch) {
  home.segment = Segment::open(offer.home, Access::kReadAndWrite);
  if (new_scratch) {
    home.scratch = std::make_shared<Scratch>(*home.core->members, Segment::open(offer.scratch, Access::kReadAndWrite));
    home.core->scratch = home.scratch;
  }
}

// Whether the ranks need a new scratch: homes are not destroyed at one moment everywhere, so some may have none any
// more.
bool agree_on_scratch(SharedHome& home, const Label& label) {
  home.scratch = home.layout.any_cast ? home.core->scratch.lock() : nullptr;
  const std::string mine = home.scratch ? packed(home.scratch->id()) + std::to_string(home.scratch->history()) : "";
  const auto all = exchange(home.core, mine, label, fingerprint(home.pieces));
  const bool same = std::all_of(all.begin(), all.end(), [&](const std::string& other) { return other == all[0]; });
  if (!same || !home.scratch) {
    return home.layout.any_cast;
  }
  home.scratch->reclaim(exchange(home.core, home.scratch->abandoned(), label));
  return false;
}

} // namespace

std::shared_ptr<Home> make_home(
    const CorePointer& core, std::vector<Piece> pieces, const HomeOptions& options, const Label& label) {
  check(pieces, options, core->members->size(), label);
  auto home = std::make_shared<SharedHome>(core, std::move(pieces), options.rewritten);
  const bool new_scratch = agree_on_scratch(*home, label);
  Offer offer;
  std::vector<std::shared_ptr<Segment>> made;
  std::string complaint = complaint_of([&] {
    if (core->members->rank() == 0) {
      offer = make_offer(home->layout, new_scratch, core->members->size(), made);
    }
  });
  const std::string offered = exchange(core, packed(offer), label)[0];
  if (complaint.empty()) {
    complaint = complaint_of([&] { open_offer(*home, unpacked<Offer>(offered), new_scratch); });
  }
  agree(exchange(core, complaint, label));
  for (const auto& segment : made) {
    segment->hide();
  }
  // It is written now, and nobody needs to be waited for: nobody reads what is just made.
  if (home->layout.any_in_place && !core->phases.writing()) {
    core->phases.resume(/*all_were_writing=*/true);
  }
  return home;
}

} // namespace fsdp::shm
