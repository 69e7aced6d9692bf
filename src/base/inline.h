#pragma once

/// For the body of a kernel that is compiled once for each instruction set: a function with a `target` of its own only
/// has it applied to what is inlined into it.
#define FSDP_INLINE inline __attribute__((always_inline))
