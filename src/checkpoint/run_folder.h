#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::disk {

constexpr const char* kIndexName = "index.json"; ///< the last file that a checkpoint gets

/// The folder in which the checkpoints of a run lie: "step-00000100", or "step-00000100.1" when that step is saved
/// again. What is being written or removed is named ".tmp-...", and is seen by nobody. For one process at a time, but
/// for `latest`.
class RunFolder {
 public:
  explicit RunFolder(std::string path) : path_(std::move(path)) {}

  /// Of the highest step, and the last of those of one step; nothing if there is none.
  std::optional<std::string> latest() const;

  /// Where a step is while it is being written.
  std::string unfinished(int64_t step) const;
  /// Makes that, empty. What an interrupted run has left is removed before, and may stay if it is another step's.
  std::string begin(int64_t step) const;
  /// Makes what was begun the checkpoint of its step, whose path is returned. Its files have to be on the disk; then it
  /// is there whatever happens afterwards, and older ones of this step are not, but for what cannot be removed.
  std::string finish(const std::string& begun, int64_t step) const;
  /// All but the last `count` are removed, but never `kept`; of what cannot be removed there is a warning.
  void keep_last(int64_t count, const std::string& kept) const;

 private:
  struct Entry {
    int64_t step;
    int64_t attempt;
    std::string name;
  };
  /// From the first to the last.
  std::vector<Entry> entries() const;
  void remove(const std::string& name) const;
  void remove_unfinished() const;

  std::string path_;
};

} // namespace fsdp::disk
