#include "comm/conformance.h"
#include "comm/custom_group.h"
#include "comm/shm_backends.h"
#include "support/selected.h"

namespace fsdp::testing {
namespace {

void run_alone(int, std::chrono::milliseconds, const RankBody& body) {
  body(group_of_one());
}

/// As users bring them: out of what the group has.
void all_gather(at::Tensor& output, const at::Tensor& input, Group& group) {
  const auto dtype = input.scalar_type();
  const auto home = group.make_home({piece(output.numel(), input.numel(), dtype)}, {}, kTest);
  home->begin_write(kTest);
  view_of(home->slice(0), input.numel(), dtype).copy_(input);
  const auto gathered = home->gather(kTest);
  gathered->wait();
  output.copy_(view_of(gathered->piece(0), output.numel(), dtype));
  group.barrier(kTest);
}

void sum_and_scatter(at::Tensor& output, const at::Tensor& input, Group& group) {
  group.reduce_scatter({{input.clone()}, {{input.numel(), output.numel()}}, {output}}, kTest)->wait();
}

template <typename Decorate>
Backend decorated(const std::string& name, int ranks, Decorate decorate) {
  const auto run = [decorate](int size, std::chrono::milliseconds timeout, const RankBody& body) {
    run_threads(size, timeout, [&](const GroupPointer& group) { body(decorate(group)); });
  };
  return {.name = name, .ranks = ranks, .run = run, .checks_order = false}; // labels are the user's
}

std::vector<Backend> decorated_backends() {
  std::vector<Backend> backends;
  for (const int ranks : wants_all_combinations() ? std::vector{2, 3, 4} : std::vector{3}) {
    backends.push_back(
        decorated("AllGather", ranks, [](const GroupPointer& group) { return with_all_gather(group, &all_gather); }));
    backends.push_back(decorated("ReduceScatter", ranks, [](const GroupPointer& group) {
      return with_reduce_scatter(group, &sum_and_scatter);
    }));
  }
  return backends;
}

} // namespace

INSTANTIATE_TEST_SUITE_P(Custom, Conformance, ::testing::ValuesIn(decorated_backends()), backend_name);
INSTANTIATE_TEST_SUITE_P(Alone, Conformance, ::testing::Values(Backend{"Alone", 1, &run_alone}), backend_name);
INSTANTIATE_TEST_SUITE_P(Shm, Conformance, ::testing::ValuesIn(shm_backends()), backend_name);

const ProcessOptions kWithoutArena{.timeout = std::chrono::minutes(8), .environment = {{"FSDP_TEST_NO_ARENA", "1"}}};

class ShmProcesses : public ::testing::TestWithParam<int> {};

TEST_P(ShmProcesses, Conform) {
  run_tests_on_processes(GetParam(), "Shm/Conformance.*", {.timeout = std::chrono::minutes(8)});
}

INSTANTIATE_TEST_SUITE_P(Ranks, ShmProcesses, ::testing::Values(1, 2, 3, 4));

class ShmProcessesWithoutArena : public ::testing::TestWithParam<int> {};

TEST_P(ShmProcessesWithoutArena, Conform) {
  run_tests_on_processes(GetParam(), "Shm/Conformance.*", kWithoutArena);
}

INSTANTIATE_TEST_SUITE_P(
    Ranks,
    ShmProcessesWithoutArena,
    ::testing::ValuesIn(wants_all_combinations() ? std::vector{1, 2, 3, 4} : std::vector{2, 3}));

} // namespace fsdp::testing
