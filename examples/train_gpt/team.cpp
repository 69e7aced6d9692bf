#include "team.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>

#include <fsdp/error.h>
#include <fsdp/init.h>

namespace train_gpt {
namespace {

std::string host_name() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return name;
}

} // namespace

Team Team::of_the_job() {
  return {fsdp::world_size(), {fsdp::rank()}};
}

Team Team::in_one_process(int64_t ranks) {
  if (fsdp::world_size() != 1) {
    throw fsdp::Error(
        "[options] expected one process for --single, got " + std::to_string(fsdp::world_size()) +
        ": start it without a launcher, and say --ranks " + std::to_string(fsdp::world_size()));
  }
  std::vector<int64_t> all(ranks);
  std::iota(all.begin(), all.end(), 0);
  return {ranks, std::move(all)};
}

int64_t Team::on_this_host() const {
  auto hosts = fsdp::world()->exchange(host_name(), {.operation = "exchange host names", .unit = ""});
  return std::count(hosts.begin(), hosts.end(), host_name()) * static_cast<int64_t>(mine_.size());
}

std::vector<double> Team::sum(const std::vector<double>& values) const {
  auto sums = torch::tensor(values, torch::kDouble).to(fsdp::device());
  fsdp::world()
      ->all_reduce(sums, fsdp::ReduceOp::kSum, /*divide_by=*/1, {.operation = "sum metrics", .unit = ""})
      ->wait();
  sums = sums.cpu();
  return {sums.data_ptr<double>(), sums.data_ptr<double>() + sums.numel()};
}

void Team::expect_same(const std::string& value, const std::string& what) const {
  auto values = fsdp::world()->exchange(value, {.operation = "compare", .unit = ""});
  for (size_t rank = 0; rank < values.size(); ++rank) {
    if (values[rank] != values[0]) {
      throw fsdp::Error(
          "[train_gpt] expected the same " + what + " on all ranks, got another on rank " + std::to_string(rank) +
          " than on rank 0: start all ranks with the same options and files");
    }
  }
}

void GradientMean::take(const std::vector<torch::Tensor>& parameters) {
  sums_.resize(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    auto& gradient = parameters[i].mutable_grad();
    if (taken_ == 0) {
      sums_[i] = gradient;
    } else {
      sums_[i].add_(gradient);
    }
    gradient.reset();
  }
  ++taken_;
}

void GradientMean::give(const std::vector<torch::Tensor>& parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    parameters[i].mutable_grad() = std::move(sums_[i]).div_(static_cast<double>(taken_));
  }
  sums_.clear();
  taken_ = 0;
}

} // namespace train_gpt
