#include <fsdp/shown_shard.h>

namespace fsdp {

ShownShard::~ShownShard() = default;

} // namespace fsdp
