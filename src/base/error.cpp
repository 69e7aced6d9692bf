#include <fsdp/error.h>

namespace fsdp {

// Out of line, so that the type information lives in one library and exceptions cross its boundary.
Error::~Error() = default;
CommError::~CommError() = default;

} // namespace fsdp
