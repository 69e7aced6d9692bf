#include "comm/conformance.h"
#include "comm/shm_backends.h"

namespace fsdp::testing {
namespace {

void run_alone(int, std::chrono::milliseconds, const RankBody& body) {
  body(group_of_one());
}

} // namespace

INSTANTIATE_TEST_SUITE_P(Alone, Conformance, ::testing::Values(Backend{"Alone", 1, &run_alone}), backend_name);
INSTANTIATE_TEST_SUITE_P(Shm, Conformance, ::testing::ValuesIn(shm_backends()), backend_name);

class ShmProcesses : public ::testing::TestWithParam<int> {};

TEST_P(ShmProcesses, Conform) {
  run_tests_on_processes(GetParam(), "Shm/Conformance.*");
}

TEST_P(ShmProcesses, ConformWithoutArena) {
  run_tests_on_processes(GetParam(), "Shm/Conformance.*", {.environment = {{"FSDP_TEST_NO_ARENA", "1"}}});
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShmProcesses, ::testing::Values(1, 2, 3, 4));

} // namespace fsdp::testing
