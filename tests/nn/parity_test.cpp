#include "nn/parity.h"

#include "nn/subjects.h"

namespace fsdp::testing {
namespace {

class Parity : public ::testing::TestWithParam<int> {};

TEST_P(Parity, Mlp) {
  expect_parity({.make = [] { return subjects::mlp(); }, .steps = 10}, GetParam());
}

TEST_P(Parity, TiedWeights) {
  expect_parity({.make = [] { return subjects::tied(); }, .steps = 10}, GetParam());
}

TEST_P(Parity, OneUnit) {
  expect_parity({.make = [] { return subjects::tied(); }, .shard_parts = false}, GetParam());
}

TEST_P(Parity, Checkpointed) {
  expect_parity({.make = [] { return subjects::tied(/*checkpointed=*/true); }, .steps = 10}, GetParam());
}

INSTANTIATE_TEST_SUITE_P(Ranks, Parity, ::testing::Values(1, 2, 3, 4));

} // namespace
} // namespace fsdp::testing
