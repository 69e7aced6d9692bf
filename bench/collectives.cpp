// Collectives of the shared-memory group beside memcpy. Started by bench/run.py; bench/collectives.py measures Gloo.
#include <cstring>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <fsdp/group.h>
#include <fsdp/init.h>

#include "serve.h"

namespace bench {
namespace {

const fsdp::Label kLabel{"benchmark", ""};

double seconds(const std::function<void()>& measured) {
  fsdp::barrier();
  const auto start = std::chrono::steady_clock::now();
  measured();
  return seconds_since(start);
}

/// All ranks' slices of one tensor, in this rank's private memory.
class AllGather {
 public:
  explicit AllGather(int64_t numel) : whole_(at::zeros({numel})) {
    const int64_t chunk = numel / fsdp::world_size();
    home_ = fsdp::world()->make_home({{numel, chunk, at::kFloat, at::kFloat}}, {}, kLabel);
    home_->begin_write(kLabel);
    std::memset(home_->slice(0), 0, static_cast<size_t>(chunk) * sizeof(float));
  }

  double time_copy() {
    home_->begin_write(kLabel);
    return seconds([&] {
      const auto gathered = home_->gather(kLabel);
      gathered->wait();
      std::memcpy(whole_.mutable_data_ptr(), gathered->piece(0), whole_.nbytes());
    });
  }

  /// Where nothing is copied: the slices are read where they lie.
  double time_in_place() {
    home_->begin_write(kLabel);
    return seconds([&] { home_->gather(kLabel)->wait(); });
  }

 private:
  at::Tensor whole_;
  std::shared_ptr<fsdp::Home> home_;
};

class ReduceScatter {
 public:
  explicit ReduceScatter(int64_t numel)
      : chunk_(numel / fsdp::world_size()), whole_(at::full({numel}, 1.0f)), slice_(at::zeros({chunk_})) {}

  double time() {
    return seconds([&] {
      fsdp::world()->reduce_scatter({{whole_}, {{whole_.numel(), chunk_}}, {slice_}, 2}, kLabel)->wait();
    });
  }

 private:
  int64_t chunk_;
  at::Tensor whole_, slice_;
};

/// A memcpy that reads and writes as many bytes as a rank's part of a reduce-scatter does.
class Copy {
 public:
  explicit Copy(int64_t numel) {
    const int64_t chunk = numel / fsdp::world_size();
    from_ = at::full({(fsdp::world_size() + 1) * chunk / 2}, 1.0f);
    to_ = at::zeros_like(from_);
  }

  double time() {
    return seconds([&] { std::memcpy(to_.mutable_data_ptr(), from_.const_data_ptr(), from_.nbytes()); });
  }

 private:
  at::Tensor from_, to_;
};

/// The best of a few, in seconds.
double best(int times, const std::function<double()>& measure) {
  double least = measure();
  for (int i = 1; i < times; ++i) {
    least = std::min(least, measure());
  }
  return least;
}

Json measure(const Json& request) {
  const int64_t numel = request.at("mebibytes").get<int64_t>() << 18;
  const int times = request.at("times");
  AllGather gather(numel);
  ReduceScatter reduce(numel);
  Copy copy(numel);
  return {
      {"all_gather", best(times, [&] { return gather.time_copy(); })},
      {"unshard", best(times, [&] { return gather.time_in_place(); })},
      {"reduce_scatter", best(times, [&] { return reduce.time(); })},
      {"memcpy", best(times, [&] { return copy.time(); })},
      {"barrier", best(100 * times, [] { return seconds(fsdp::barrier); })}};
}

} // namespace
} // namespace bench

int main() {
  fsdp::init();
  bench::serve({{"measure", bench::measure}});
  fsdp::shutdown();
}
