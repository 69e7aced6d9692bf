#include <fsdp/save.h>

#include <utility>

#include <fsdp/save_async.h>
#include <fsdp/saved_state.h>

#include "base/check.h"
#include "base/phrase.h"
#include "checkpoint/all_agree.h"
#include "checkpoint/background_save.h"
#include "checkpoint/folder.h"
#include "checkpoint/random_state.h"
#include "checkpoint/run_folder.h"
#include "checkpoint/save_of_rank.h"
#include "checkpoint/seats.h"

namespace fsdp {

namespace {

using namespace disk; // NOLINT: what it is made of

void check(const std::string& dir, int64_t step, const SaveOptions& options) {
  FSDP_CHECK(!dir.empty(), "[save] expected a folder, got no name: name one");
  FSDP_CHECK(options.keep_last >= 0, "[save] expected keep_last of 0 or more, got {}", options.keep_last);
  FSDP_CHECK(step >= 0, "[save] expected a step of 0 or more, got {}", step);
  FSDP_CHECK(
      options.block_bytes >= 16 && options.block_bytes % 16 == 0 && options.block_bytes <= int64_t{1} << 30,
      "[save] expected block_bytes between 16 and 2^30, and a multiple of 16, got {}",
      options.block_bytes);
  FSDP_CHECK(
      options.max_staged_bytes >= 0, "[save] expected max_staged_bytes of 0 or more, got {}", options.max_staged_bytes);
}

/// A checkpoint that is being written, of all ranks.
class Save {
 public:
  Save(const std::string& dir, int64_t step, const SaveOptions& options, const Label& label)
      : group_(group_or_world(options.group)),
        label_(label),
        dir_(dir),
        step_(step),
        options_(options),
        mine_(dir, step, options, group_->rank(), group_->size()) {}

  std::string run(const std::function<StateOfRank()>& state) {
    StateOfRank of_rank;
    begin(state, of_rank);
    together([&] {
      mine_.begin(of_rank);
      mine_.write(/*with_bar=*/true);
    });
    std::string finished;
    together([&] { finished = group_->rank() == 0 ? mine_.finish() : ""; });
    return group_->exchange(finished, label_)[0];
  }

  PendingSave run_in_background(const std::function<StateOfRank()>& state) {
    StateOfRank of_rank;
    begin(state, of_rank);
    auto save = std::make_shared<BackgroundSave>(std::move(mine_), group_);
    BackgroundSave::start(save, of_rank);
    return PendingSave(std::move(save));
  }

 private:
  void begin(const std::function<StateOfRank()>& state, StateOfRank& of_rank) {
    BackgroundSave::settle(group_);
    expect_same_everywhere();
    together([&] {
      check(dir_, step_, options_);
      BackgroundSave::expect_settled(dir_, label_.operation);
      of_rank = state();
    });
    together([&] { mine_.make_folder(); }); // removes what is there, which may be what a rank has refused to write over
    Seats seats;
    seats.add(of_rank);
    seats.exchange(*group_, label_);
    mine_.set_seats(std::move(seats));
  }

  void expect_same_everywhere() {
    const auto given = group_->exchange(phrase("step {} and keep_last {}", step_, options_.keep_last), label_);
    for (size_t rank = 1; rank < given.size(); ++rank) {
      FSDP_CHECK(
          given[rank] == given[0],
          "[{}] expected the same on all ranks, got {} on the first one and {} on rank {}: give all of them the same",
          label_.operation,
          given[0],
          given[rank],
          rank);
    }
  }

  /// What is half written makes room if there is an error.
  void together(const std::function<void()>& body) {
    all_agree(*group_, label_, body, [&] { mine_.give_up(); });
  }

  std::shared_ptr<Group> group_;
  const Label& label_;
  std::string dir_;
  int64_t step_;
  const SaveOptions& options_;
  SaveOfRank mine_;
};

const Label kSave{"save", ""}, kSaveAsync{"save_async", ""};

StateOfRank of_this_rank(const StateToSave& state) {
  StateOfRank mine{.model = sharded_state_dict(state.model), .extra = state.extra, .device = training_device()};
  if (state.optimizer != nullptr) {
    mine.optimizer = sharded_optim_state_dict(state.model, *state.optimizer);
  }
  return mine;
}

} // namespace

std::string saved_state::save(
    const std::string& dir, int64_t step, const std::function<StateOfRank()>& state, const SaveOptions& options) {
  return Save(dir, step, options, kSave).run(state);
}

PendingSave saved_state::save_async(
    const std::string& dir, int64_t step, const std::function<StateOfRank()>& state, const SaveOptions& options) {
  // The program may change its directory meanwhile.
  return Save(dir.empty() ? dir : from_root(dir), step, options, kSaveAsync).run_in_background(state);
}

std::string save(const std::string& dir, const StateToSave& state, const SaveOptions& options) {
  return saved_state::save(
      dir, state.step, [&] { return of_this_rank(state); }, options);
}

void saved_state::wait_for_all() {
  BackgroundSave::wait_for_all();
}

PendingSave save_async(const std::string& dir, const StateToSave& state, const SaveOptions& options) {
  return saved_state::save_async(
      dir, state.step, [&] { return of_this_rank(state); }, options);
}

std::optional<std::string> latest(const std::string& dir) {
  return RunFolder(dir).latest();
}

PendingSave::PendingSave(std::shared_ptr<BackgroundSave> save) : save_(std::move(save)) {}
PendingSave::PendingSave(PendingSave&&) noexcept = default;

PendingSave& PendingSave::operator=(PendingSave&& other) noexcept {
  std::swap(save_, other.save_);
  const PendingSave former(std::move(other)); // lets go of what was here
  return *this;
}

PendingSave::~PendingSave() {
  if (save_ != nullptr) {
    save_->let_go();
  }
}

bool PendingSave::done() const {
  FSDP_CHECK(save_ != nullptr, "[save_async] this PendingSave was moved from: ask the one that it became");
  return save_->has_ended();
}

std::string PendingSave::wait() {
  FSDP_CHECK(save_ != nullptr, "[save_async] this PendingSave was moved from: ask the one that it became");
  return save_->result();
}

} // namespace fsdp
