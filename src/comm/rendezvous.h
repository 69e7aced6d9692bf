#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "comm/launcher.h"

namespace c10d {
class Store;
}

namespace fsdp {

/// The ranks of a job, met at a store. Not thread safe.
class Rendezvous {
 public:
  /// Returns once all ranks are there. A CommError names those that did not come within `timeout`.
  Rendezvous(const Launch& launch, std::chrono::milliseconds timeout);
  ~Rendezvous();

  /// Every rank's string, in rank order. Collective.
  std::vector<std::string> exchange(const std::string& mine);
  /// A part of the store for one group's own use.
  c10::intrusive_ptr<c10d::Store> store(const std::string& name) const;
  /// Says that this rank will not use the store again. The rank that serves it waits for the others' word, at most
  /// `limit`.
  void leave(std::chrono::milliseconds limit);

 private:
  bool serves() const;
  std::chrono::milliseconds limit() const;
  void arrive();
  /// Until every rank has set its key; an error names those that have not, or that have died.
  void wait_for(const std::string& what);
  bool all_have(const std::string& what, std::chrono::milliseconds within) const;
  /// What `talk` gets from the store, or an error.
  std::string ask(std::function<std::string()> talk) const;
  [[noreturn]] void fail(const std::string& reason) const;
  /// Who serves the others gives up when they know why, or have had the time to hear it.
  void outlast_others() const;

  Launch launch_;
  std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::Store> store_;
  int exchanges_ = 0;
};

} // namespace fsdp
