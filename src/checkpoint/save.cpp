#include <fsdp/saved_state.h>

#include <algorithm>
#include <cstdio>
#include <functional>

#include <c10/util/accumulate.h>

#include "base/check.h"
#include "checkpoint/all_agree.h"
#include "checkpoint/checkpoint_index.h"
#include "checkpoint/file.h"
#include "checkpoint/folder.h"
#include "checkpoint/names_in_index.h"
#include "checkpoint/piece_writer.h"
#include "checkpoint/quietly.h"
#include "checkpoint/random_state.h"
#include "checkpoint/replica_turns.h"
#include "checkpoint/run_folder.h"

namespace fsdp {

namespace {

using namespace disk; // NOLINT: what it is made of

/// What one rank gives to a checkpoint.
class Contents {
 public:
  explicit Contents(int rank, int64_t step) : rank_(rank), turns_(rank == 0) {
    numbers_.step = step;
  }

  void add(const StateOfRank& state) {
    for (const auto& item : state.model) {
      add(kModel + item.key(), item.value());
    }
    if (state.optimizer) {
      add(*state.optimizer);
    }
    for (const auto& [device, random_state] : random_states(state.device)) {
      pieces_.push_back({random_name(rank_, device), held(random_state), /*written_here=*/true});
    }
    if (rank_ == 0) {
      add_extra(state.extra);
    }
  }

  CheckpointIndex write(const PieceFile& file) const {
    CheckpointIndex index = numbers_;
    index.block_bytes = file.block_bytes;
    index.tensors = write_pieces(pieces_, file);
    return index;
  }

 private:
  void add(const std::string& name, const HeldTensor& held) {
    pieces_.push_back({name, held, turns_.is_mine(held)});
  }

  void add(const ShardedOptimStateDict& optimizer) {
    auto& numbers = numbers_.optimizer.emplace();
    for (const auto& item : optimizer.state) {
      for (const auto& [key, tensor] : item.value().tensors) {
        add(optimizer_name(item.key(), key), tensor);
      }
      if (is_updated_here(item.value())) {
        numbers.of_params[item.key()] = item.value().scalars;
      }
    }
    for (const auto& group : optimizer.param_groups) {
      numbers.groups.push_back({group.params, group.options});
    }
  }

  // Without elements a rank may have another number of steps, or none.
  static bool is_updated_here(const ShardedOptimStateDict::ParamState& state) {
    return state.tensors.empty() || std::any_of(state.tensors.begin(), state.tensors.end(), [](const auto& item) {
             return item.second.extent.numel() > 0 || c10::multiply_integers(item.second.sizes) == 0;
           });
  }

  void add_extra(const std::map<std::string, c10::IValue>& extra) {
    for (const auto& [name, value] : extra) {
      if (value.isTensor()) {
        pieces_.push_back({kExtra + name, held(value.toTensor()), /*written_here=*/true});
      } else {
        numbers_.extra[name] = value;
      }
    }
  }

  int rank_;
  ReplicaTurns turns_;
  std::vector<PieceToWrite> pieces_{};
  CheckpointIndex numbers_{}; // without tensors
};

std::string file_name(int rank, const char* ending) {
  char name[64];
  std::snprintf(name, sizeof(name), "rank-%05d.%s", rank, ending);
  return name;
}

std::string part_path(const std::string& folder, int rank) {
  return folder + "/" + file_name(rank, "json");
}

CheckpointIndex read_part(const std::string& folder, int rank) {
  const std::string path = part_path(folder, rank);
  return parse_index(read_text(path, kLongestIndex, File::Links::kRefuse), path);
}

// Before older checkpoints make room for it.
void check_readable(const std::string& text, const std::string& path) {
  FSDP_CHECK(
      static_cast<int64_t>(text.size()) <= kLongestIndex,
      "[save] {} would have {} bytes, and no more than {} are read: give larger block_bytes",
      path,
      text.size(),
      kLongestIndex);
  parse_index(text, path);
}

/// Writes the index, of which each rank has written its part.
void write_index(const std::string& folder, int ranks) {
  CheckpointIndex index = read_part(folder, 0);
  for (int rank = 1; rank < ranks; ++rank) {
    add_part(index, read_part(folder, rank));
  }
  check_complete(index);
  const std::string path = folder + "/" + kIndexName, text = to_text(index);
  check_readable(text, path);
  write_text(path, text);
  for (int rank = 0; rank < ranks; ++rank) {
    remove_file(part_path(folder, rank));
  }
}

void check(const std::string& dir, int64_t step, const SaveOptions& options) {
  FSDP_CHECK(!dir.empty(), "[save] expected a folder, got no name: name one");
  FSDP_CHECK(step >= 0, "[save] expected a step of 0 or more, got {}", step);
  FSDP_CHECK(
      options.block_bytes >= 16 && options.block_bytes % 16 == 0 && options.block_bytes <= int64_t{1} << 30,
      "[save] expected block_bytes between 16 and 2^30, and a multiple of 16, got {}",
      options.block_bytes);
}

/// A checkpoint that is being written, of all ranks.
class Save {
 public:
  Save(const std::string& dir, int64_t step, const SaveOptions& options)
      : dir_(dir), run_(dir), step_(step), begun_(run_.unfinished(step)), options_(options) {
    group_ = group_or_world(options.group);
    rank_ = group_->rank();
  }

  std::string run(const std::function<StateOfRank()>& state) {
    Contents mine(rank_, step_);
    together([&] {
      check(dir_, step_, options_);
      mine.add(state());
      if (rank_ == 0) {
        run_.begin(step_);
      }
    });
    together([&] {
      const auto index = mine.write({begun_, file_name(rank_, "safetensors"), options_.block_bytes});
      write_text(part_path(begun_, rank_), to_text(index));
    });
    std::string finished;
    together([&] {
      if (rank_ == 0) {
        write_index(begun_, group_->size());
        finished = run_.finish(begun_, step_);
      }
    });
    finished = group_->exchange(finished, kLabel)[0];
    if (rank_ == 0) {
      remove_older(finished);
    }
    return finished;
  }

 private:
  inline static const Label kLabel{"save", ""};

  /// What is half written makes room if there is an error.
  void together(const std::function<void()>& body) {
    all_agree(*group_, kLabel, body, [&] { remove_folder_tree(begun_); });
  }

  void remove_older(const std::string& kept) const {
    if (options_.keep_last > 0) {
      quietly([&] { run_.keep_last(options_.keep_last, kept); });
    }
  }

  std::string dir_;
  RunFolder run_;
  int64_t step_;
  std::string begun_;
  const SaveOptions& options_;
  std::shared_ptr<Group> group_{};
  int rank_ = 0;
};

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
  return Save(dir, step, options).run(state);
}

std::string save(const std::string& dir, const StateToSave& state, const SaveOptions& options) {
  return saved_state::save(
      dir, state.step, [&] { return of_this_rank(state); }, options);
}

std::optional<std::string> latest(const std::string& dir) {
  return RunFolder(dir).latest();
}

} // namespace fsdp
