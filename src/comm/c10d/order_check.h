#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include <fsdp/group.h>

#include "base/stream.h"

namespace fsdp::adapter {

/// One collective among all of a group.
struct CollectiveId {
  Label label{};
  const char* collective = ""; ///< a literal: "all-gather", ...
  int64_t number = 0; ///< the same on all ranks that are in step
};

/// What a rank is about to do, and its FSDP_CHECK_ORDER, in a form of fixed size that ranks exchange to find out
/// whether all do the same. On the host; page-locked where `device`, to which it goes, needs that for copies that
/// nobody waits for.
at::Tensor order_record(
    const CollectiveId& id, int64_t bytes, c10::Device device, std::optional<bool> check_order = std::nullopt);

/// Compares the records of all ranks with this rank's. Names both sides of the first difference; empty if there is
/// none. Records of zeros have not come.
std::string find_mismatch(const at::Tensor& records, int rank, int size);

/// What all ranks said of the collectives that were started last, on its way from the device: the host does not wait
/// for it, and so learns of a difference at one of the next collectives. On the CPU it is there at once.
class OrderRecords {
 public:
  /// `all` are complete on the current stream; `mine` is kept as long as they are on their way.
  void add(const at::Tensor& all, at::Tensor mine);
  /// The first difference in what has arrived.
  std::string find_mismatch(int rank, int size);

 private:
  struct Records {
    at::Tensor all; // on the host
    at::Tensor mine; // a copy of it may still be running
    Event arrived;
  };
  std::deque<Records> records_;
};

} // namespace fsdp::adapter
