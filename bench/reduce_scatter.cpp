// Reduce-scatter and all-gather among the ranks of one host, beside memcpy of the same bytes by every rank at once.
//   scripts/launch -n 2 build/bin/bench_reduce_scatter [backend]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include <fsdp/group.h>
#include <fsdp/init.h>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kRepeats = 20;
const fsdp::Label kLabel{"benchmark", ""};

/// The best of many times, in milliseconds; `prepare` is not counted, and all ranks start together.
double best_time(fsdp::Group& group, const std::function<void()>& prepare, const std::function<void()>& measured) {
  double best = 1e30;
  for (int i = 0; i < kRepeats; ++i) {
    prepare();
    group.barrier(kLabel);
    const auto start = Clock::now();
    measured();
    best = std::min(best, std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  group.barrier(kLabel);
  return best;
}

double time_reduce_scatter(fsdp::Group& group, int64_t numel) {
  const int64_t chunk = numel / group.size();
  const at::Tensor whole = at::full({numel}, 1.0f);
  const at::Tensor slice = at::zeros({chunk});
  return best_time(
      group,
      [] {},
      [&] {
        group.reduce_scatter({{whole}, {chunk}, {slice}, 2}, kLabel)->wait();
      });
}

double time_gather(fsdp::Group& group, int64_t numel, c10::ScalarType gathered_dtype) {
  const int64_t chunk = numel / group.size();
  const auto home = group.make_home({{numel, chunk, at::kFloat, gathered_dtype}}, {}, kLabel);
  home->begin_write(kLabel);
  std::memset(home->slice(0), 0, static_cast<size_t>(chunk) * 4);
  return best_time(
      group, [&] { home->begin_write(kLabel); }, [&] { home->gather(kLabel)->wait(); });
}

double time_memcpy(fsdp::Group& group, int64_t numel) {
  const at::Tensor from = at::full({numel}, 1.0f);
  const at::Tensor to = at::zeros({numel});
  return best_time(
      group, [] {}, [&] { std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes()); });
}

void report(fsdp::Group& group, int64_t mebibytes) {
  const int64_t numel = mebibytes << 18;
  const double copy = time_memcpy(group, numel);
  const double reduce = time_reduce_scatter(group, numel);
  const double gather = time_gather(group, numel, at::kFloat);
  const double cast = time_gather(group, numel, at::kBFloat16);
  if (group.rank() == 0) {
    const auto rate = [&](double ms) { return static_cast<double>(mebibytes) * 1.048576 / ms; };
    std::printf(
        "%-6s %4lld MiB  memcpy %7.3f ms (%5.1f GB/s)  reduce-scatter %7.3f ms (%5.1f GB/s, %.2f of memcpy)  "
        "gather %7.3f ms  gather as bf16 %7.3f ms\n",
        group.name().c_str(),
        static_cast<long long>(mebibytes),
        copy,
        rate(copy),
        reduce,
        rate(reduce),
        reduce / copy,
        gather,
        cast);
  }
}

} // namespace

int main(int argc, char** argv) {
  fsdp::init({.backend = argc > 1 ? argv[1] : ""});
  for (const int64_t mebibytes : {1, 16, 64}) {
    report(*fsdp::world(), mebibytes);
  }
  fsdp::shutdown();
}
