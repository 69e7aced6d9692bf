#pragma once

#include <memory>
#include <string>

#include <fsdp/export.h>
#include <fsdp/save.h>
#include <fsdp/saved_state.h>

namespace fsdp {

namespace disk {
class BackgroundSave;
}

/// A checkpoint that is being written while the program goes on.
class FSDP_API PendingSave {
 public:
  explicit PendingSave(std::shared_ptr<disk::BackgroundSave> save);
  PendingSave(PendingSave&&) noexcept;
  PendingSave& operator=(PendingSave&&) noexcept;
  /// Waits for what this rank writes; on the first rank, for a while, for the others. An Error that nobody has asked
  /// for is a warning.
  ~PendingSave();

  /// Whether this rank is done with it. Communicates nothing.
  bool done() const;
  /// The checkpoint's path, once it is there. An Error on one rank is one on all. Collective.
  std::string wait();

 private:
  std::shared_ptr<disk::BackgroundSave> save_;
};

/// As `save`, but returns once parameters are copied, and what operators write to an optimizer's states does not reach
/// the save: what is saved is what is there at the call. The checkpoint appears when all ranks have written theirs,
/// whether or not anybody waits. Another save or load of the same ranks waits for it first. Copies need as much
/// memory as this rank's part has, or `max_staged_bytes`. Collective.
FSDP_API PendingSave save_async(const std::string& dir, const StateToSave& state, const SaveOptions& options = {});

namespace saved_state {

/// As `fsdp::save_async`.
FSDP_API PendingSave save_async(
    const std::string& dir, int64_t step, const std::function<StateOfRank()>& state, const SaveOptions& options = {});

/// For what this process writes: `exit` does so by itself, and `_exit`, with which some of Python's processes end, not.
FSDP_API void wait_for_all();

} // namespace saved_state

} // namespace fsdp
