// What the host does around the computing: units of a few tiny layers, on a process group whose collectives do nothing.
// Started by bench/run.py; bench/host.py is the same in Python.
#include <functional>
#include <vector>

#include <ATen/ops/add.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include "linear_units.h"
#include "no_op_backend.h"
#include "serve.h"

namespace bench {
namespace {

fsdp::Mesh mesh_of_nobody(int world) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(0, world);
  const auto backend = c10::make_intrusive<NoOpBackend>(0, world);
  group->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::CUSTOM, backend);
  return fsdp::Mesh::from_group(group);
}

using Forward = std::function<torch::Tensor(const torch::Tensor&)>;

/// `model` sharded; how to call it.
Forward shard(LinearUnits model, const fsdp::Mesh& mesh, bool fsdp1) {
  if (fsdp1) {
    return [wrapped = wrap(model, mesh)](const torch::Tensor& x) mutable { return wrapped(x); };
  }
  model->shard({.mesh = mesh});
  return [model](const torch::Tensor& x) mutable { return model->forward(x); };
}

/// Seconds of one forward and backward.
double time_step(const Forward& forward, LinearUnits& model, const torch::Tensor& x) {
  const auto start = std::chrono::steady_clock::now();
  forward(x).sum().backward();
  const double seconds = seconds_since(start);
  for (auto& parameter : model->parameters()) {
    parameter.mutable_grad().reset();
  }
  return seconds;
}

/// Seconds of forward and backward for each unit, without those that the layers themselves take.
Json per_unit(const Json& request) {
  const int64_t units = request.at("units"), linears = request.at("linears"), repeats = request.at("repeats");
  LinearUnits sharded(units, linears), plain(units, linears);
  NoOpBackend::answers = true;
  const Forward forward = shard(sharded, mesh_of_nobody(request.at("world")), request.at("fsdp1"));
  const Forward forward_plain = [&](const torch::Tensor& x) { return plain->forward(x); };
  NoOpBackend::answers = false;
  const auto x = torch::randn({4, kLinearWidth});
  std::vector<double> extra;
  for (int64_t i = -3; i < repeats; ++i) {
    const double with = time_step(forward, sharded, x), without = time_step(forward_plain, plain, x);
    if (i >= 0) {
      extra.push_back((with - without) / static_cast<double>(units));
    }
  }
  return extra;
}

double time_additions(const at::Tensor& a, const at::Tensor& b) {
  constexpr int kTimes = 20000;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < kTimes; ++i) {
    at::add(a, b);
  }
  return seconds_since(start) / kTimes;
}

/// Seconds that an operator takes longer on a parameter of a unit that is whole already.
Json touch(const Json& request) {
  torch::NoGradGuard no_grad;
  LinearUnits model(1, 1);
  const auto weight = model->units[0]->layers[0]->weight;
  model->shard({.mesh = mesh_of_nobody(1)});
  fsdp::as_fsdp(*model->units[0]).unshard();
  const auto plain = torch::randn({kLinearWidth, kLinearWidth});
  std::vector<double> extra;
  for (int64_t i = 0; i < request.at("repeats"); ++i) {
    extra.push_back(time_additions(weight, plain) - time_additions(plain, plain));
  }
  return extra;
}

} // namespace
} // namespace bench

int main() {
  bench::serve({{"per_unit", bench::per_unit}, {"touch", bench::touch}});
}
