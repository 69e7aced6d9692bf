#pragma once

#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include <ATen/core/ivalue.h>

#include <fsdp/export.h>
#include <fsdp/group.h>
#include <fsdp/module_ref.h>
#include <fsdp/optim_state_dict.h>
#include <fsdp/state_dict.h>

/// Checkpoints on disk. What one is, byte by byte, is in docs/checkpoints.md.
namespace fsdp {

/// Of a run: what goes on when it is loaded.
struct StateToSave {
  ModuleRef model;
  const torch::optim::Optimizer* optimizer = nullptr; ///< of those that `full_optim_state_dict` knows
  /// The program's own: numbers, texts, tensors; lists, tuples and dictionaries of numbers and texts. Of the first
  /// rank.
  std::map<std::string, c10::IValue> extra{};
  int64_t step = 0; ///< gives the checkpoint its name
};

struct SaveOptions {
  int64_t keep_last = 0; ///< of the run's checkpoints, the one just written among them; 0: all
  int64_t block_bytes = int64_t{1} << 20; ///< that have one checksum; a multiple of 16
  std::shared_ptr<Group> group = nullptr; ///< the ranks that save; null: all ranks of the job
  /// Of `save_async`: how much memory its copies take; tensors beyond that are written before it returns.
  int64_t max_staged_bytes = std::numeric_limits<int64_t>::max();
  /// Likewise: the memory of copies stays for the next ones. To ask for new memory takes ten times as long as copying.
  bool keep_staging_memory = true;
};

/// Writes the checkpoint DIR/step-NNNNNNNN, and returns its path. Each rank writes what it has into its own file, and
/// of what several have one of them; all ranks need to see the folder. It appears when all of it is on the disk:
/// whatever happens before, the checkpoints that are there stay. An Error on one rank is one on all. Collective.
FSDP_API std::string save(const std::string& dir, const StateToSave& state, const SaveOptions& options = {});

/// The path of the checkpoint of the highest step; nothing if there is none.
FSDP_API std::optional<std::string> latest(const std::string& dir);

/// What the values of a checkpoint go into.
struct StateToLoad {
  ModuleRef model;
  torch::optim::Optimizer* optimizer = nullptr; ///< none: the model alone is loaded
};

struct LoadOptions {
  bool strict = true; ///< names that are missing, or too many, are an error
  /// Each rank's random number generators go on from where the same rank's were; those of further ranks stay as they
  /// are.
  bool random_numbers = true;
  std::shared_ptr<Group> group = nullptr; ///< the ranks that load; null: all ranks of the job
};

struct LoadedState {
  std::string path; ///< of the checkpoint
  int64_t step = 0;
  std::map<std::string, c10::IValue> extra{};
  IncompatibleKeys keys{}; ///< of the model, unless `strict`
};

/// From a checkpoint, or the latest in a run's folder, into a model and an optimizer however they are sharded, or not
/// at all, on any number of ranks. Each rank reads what it needs. Nothing changes if there is an Error, which is one on
/// all ranks. Until all has been read, what this rank loads is in its memory twice. Collective.
FSDP_API LoadedState load(const std::string& dir, const StateToLoad& state, const LoadOptions& options = {});

} // namespace fsdp
