#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "batches.h"
#include "history.h"
#include "options.h"
#include "team.h"
#include "trainer.h"

namespace train_gpt {

/// The run as it is on disk. Beside the model, its optimizer and the random numbers, which `fsdp::save` knows, it is
/// how far the run has come, what was measured on the way, and which batches come next: those that would have come.
class Checkpoints {
 public:
  /// Throws fsdp::Error where the folder has another run's checkpoints. All ranks together.
  Checkpoints(const Options& options, const Batches& batches, const Team& team);

  /// Goes on from the latest checkpoint, if it is asked for and there is one. All ranks together.
  void resume(Trainer& trainer, History& history);
  /// Whether to save after so many steps.
  bool due(int64_t step, bool last) const;
  /// All ranks together.
  void save(Trainer& trainer, const History& history);
  /// Of the last one that was saved or loaded; empty: none.
  const std::string& path() const {
    return path_;
  }

 private:
  std::map<std::string, c10::IValue> notes(const Trainer& trainer, const History& history) const;
  void expect_same_run(const std::map<std::string, c10::IValue>& notes) const;

  const Options& options_;
  const Batches& batches_;
  const Team& team_;
  std::string path_;
};

} // namespace train_gpt
