#include <fsdp/group.h>

namespace fsdp {

Work::~Work() = default;
Gathered::~Gathered() = default;
Home::~Home() = default;
Group::~Group() = default;

} // namespace fsdp
