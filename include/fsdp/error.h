#pragma once

#include <stdexcept>
#include <string>

#include <fsdp/export.h>

namespace fsdp {

/// A mistake of the caller or of the environment. The message reads
/// `[operation] what was expected, what was given, what to do`.
class FSDP_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  ~Error() override;
};

/// Ranks could not go on together: a peer died, a wait ran out of time, or ranks called different collectives.
/// Names this rank, the unit and the operation. The group cannot be used afterwards.
class FSDP_API CommError : public Error {
 public:
  using Error::Error;
  ~CommError() override;
};

} // namespace fsdp
