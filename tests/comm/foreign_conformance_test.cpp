#include "comm/conformance.h"
#include "comm/foreign_backends.h"

namespace fsdp::testing {
namespace {

const Backend kSparse{
    .name = "Sparse",
    .ranks = 3,
    .run = &run_sparse,
    .sums_in_rank_order = false,
    .checks_order = false,
    .splits = false};

} // namespace

INSTANTIATE_TEST_SUITE_P(Foreign, Conformance, ::testing::Values(kSparse), backend_name);

} // namespace fsdp::testing
