#pragma once

namespace fsdp::engine {

/// Calls of sharded modules that run on this thread: what is recorded in one is a forward. Other graphs on parameters
/// may be made outside, such as that of the product which a low-rank adapter adds to a weight for good.
namespace running_calls {

void begin();
void end();
bool any();

} // namespace running_calls

} // namespace fsdp::engine
