#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "comm/launcher.h"

namespace c10d {
class Store;
}

namespace fsdp {

/// The ranks of a job, met at a store. However many they are, each makes so many requests: in a round of an exchange,
/// and in a second of waiting. Not thread safe.
class Rendezvous {
 public:
  /// Returns once all ranks are there. A CommError names those that did not come within `timeout`.
  Rendezvous(const Launch& launch, std::chrono::milliseconds timeout);
  /// At a store that is this rendezvous' alone.
  Rendezvous(const Launch& launch, std::chrono::milliseconds timeout, c10::intrusive_ptr<c10d::Store> store);
  ~Rendezvous();

  /// Every rank's string, in rank order. Collective.
  std::vector<std::string> exchange(const std::string& mine);
  /// A part of the store for one group's own use.
  c10::intrusive_ptr<c10d::Store> store(const std::string& name) const;
  /// Says that this rank knows all it has to. The rank that serves the store waits for the others' word, and may then
  /// go.
  void conclude();
  /// Tells the others why this rank will not go on, as they may not either. The rank that serves the store waits until
  /// all know, for a moment.
  void give_up(const std::string& reason);
  /// Says that this rank will not use the store again. The rank that serves it waits for the others' word, at most
  /// `limit`.
  void leave(std::chrono::milliseconds limit);

 private:
  /// Something that all ranks do.
  struct Round {
    std::string key;
    std::string done; ///< for errors: "rank 1 has not ..."
    bool one_waits = false; ///< so it watches all others
  };

  std::chrono::milliseconds limit() const;
  void be_seen();
  void come_to(const Round& round);
  /// Until every rank has come to the round; an error names those that have not, or one that has died.
  void await_all(const Round& round);
  bool all_came(const Round& round, std::chrono::milliseconds within);
  /// What `talk`, which itself may wait for `extra`, gets from the store, or an error.
  template <typename T>
  T ask(std::function<T()> talk, std::chrono::milliseconds extra = {});
  [[noreturn]] void fail(const std::string& reason);

  Launch launch_;
  std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::Store> store_;
  int64_t witness_ = 0; // this process's number among those that can watch each other
  int exchanges_ = 0;
  bool gave_up_ = false;
};

/// Instead of meeting the others: tells those who come why this rank will not. Does not fail, and takes a moment at
/// most.
void refuse_to_meet(const Launch& launch, std::chrono::milliseconds timeout, const std::string& reason);

} // namespace fsdp
