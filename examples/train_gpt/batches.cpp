#include "batches.h"

#include <algorithm>

#include <fsdp/error.h>

namespace train_gpt {
namespace {

constexpr double kHeldBack = 0.05;
/// More would say little more about the model, and take long with a big text.
constexpr int64_t kMaxWindows = 128;

/// Scatters neighbouring numbers over all 64 bits (the finalizer of SplitMix64).
uint64_t scatter(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t mix(uint64_t hash, uint64_t value) {
  return scatter(hash ^ scatter(value));
}

uint64_t hash_bytes(const std::string& text) {
  uint64_t hash = text.size();
  for (unsigned char c : text) {
    hash = (hash ^ c) * 0x100000001b3;
  }
  return scatter(hash);
}

} // namespace

Batches::Batches(const std::string& text, int64_t sequence, int64_t rows_per_rank)
    : text_(
          torch::from_blob(const_cast<char*>(text.data()), {static_cast<int64_t>(text.size())}, torch::kByte).clone()),
      sequence_(sequence),
      rows_per_rank_(rows_per_rank),
      split_(static_cast<int64_t>((1 - kHeldBack) * static_cast<double>(text.size()))),
      windows_(std::min((text_.numel() - split_ - 1) / sequence, kMaxWindows)),
      fingerprint_(hash_bytes(text)) {
  if (windows_ < 1) {
    throw fsdp::Error(
        "[data] expected at least " + std::to_string(static_cast<int64_t>((sequence + 2) / kHeldBack)) +
        " bytes for sequences of " + std::to_string(sequence) + ", got " + std::to_string(text.size()) +
        ": give a longer text or a smaller --seq");
  }
}

Batch Batches::training(const BatchKey& key, int64_t rows) const {
  const uint64_t batch = mix(mix(0, key.seed), key.index);
  std::vector<int64_t> starts(rows);
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = key.first + i;
    const uint64_t hash = mix(mix(batch, row / rows_per_rank_), row % rows_per_rank_);
    starts[i] = static_cast<int64_t>(hash % static_cast<uint64_t>(split_ - sequence_));
  }
  return cut(starts);
}

Batch Batches::held_back(int64_t first, int64_t rows) const {
  int64_t stride = (held_back_bytes() - 1) / windows_; // spread over all of it
  std::vector<int64_t> starts;
  for (int64_t window = first; window < std::min(first + rows, windows_); ++window) {
    starts.push_back(split_ + window * stride);
  }
  return cut(starts);
}

Batch Batches::cut(const std::vector<int64_t>& starts) const {
  std::vector<torch::Tensor> rows;
  rows.reserve(starts.size());
  for (int64_t start : starts) {
    rows.push_back(text_.narrow(0, start, sequence_ + 1));
  }
  auto all = torch::stack(rows).to(torch::kLong);
  return {all.narrow(1, 0, sequence_).contiguous(), all.narrow(1, 1, sequence_).contiguous()};
}

} // namespace train_gpt
