#pragma once

#include <string>

#include <fsdp/export.h>

namespace fsdp {

/// While it lives, what the engine does and waits for is recorded.
class FSDP_API Trace {
 public:
  explicit Trace(const std::string& file);
  Trace(Trace&& other) noexcept;
  Trace& operator=(Trace&&) = delete;
  ~Trace();

 private:
  bool recording_ = true;
};

/// Records into `file`, with the rank before its ending ("trace.json": "trace.rank0.json"), in the format that
/// Perfetto, Chrome and `fsdp-report` read. FSDP_TRACE=file does the same for a whole run.
[[nodiscard]] FSDP_API Trace trace(const std::string& file);

} // namespace fsdp
