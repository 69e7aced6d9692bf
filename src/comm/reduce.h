#pragma once

#include "comm/rank_order.h"

namespace fsdp {

/// All numbers of a `rank_order::Reduction`, divided among the threads that LibTorch's operators use. Equal bits,
/// whatever their number.
void reduce(const rank_order::Reduction& reduction);

} // namespace fsdp
