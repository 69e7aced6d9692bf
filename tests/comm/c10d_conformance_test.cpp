#include "comm/c10d_backends.h"
#include "comm/conformance.h"

namespace fsdp::testing {

INSTANTIATE_TEST_SUITE_P(C10d, Conformance, ::testing::ValuesIn(gloo_backends({1, 2, 3, 4})), backend_name);

} // namespace fsdp::testing
