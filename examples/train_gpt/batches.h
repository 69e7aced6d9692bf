#pragma once

#include <cstdint>
#include <string>

#include <torch/torch.h>

namespace train_gpt {

struct Batch {
  torch::Tensor bytes; ///< [rows, sequence]
  torch::Tensor next; ///< the byte that follows each
};

/// Which batch of the run: nothing else decides what is in it, so that it does not matter who asks, or when.
struct BatchKey {
  int64_t seed;
  int64_t index; ///< counts the micro-batches
  int64_t first; ///< of its rows, those of all ranks counted on
};

/// A text cut in two: most of it to learn from, the end held back to test on.
class Batches {
 public:
  /// `rows_per_rank`, of a micro-batch when the run began: other ranks may go on with it, but the rows stay.
  Batches(const std::string& text, int64_t sequence, int64_t rows_per_rank);

  Batch training(const BatchKey& key, int64_t rows) const;
  int64_t held_back_windows() const {
    return windows_;
  }
  /// Windows [first, first + rows) of the held-back text, as far as there are any.
  Batch held_back(int64_t first, int64_t rows) const;

  int64_t training_bytes() const {
    return split_;
  }
  int64_t held_back_bytes() const {
    return text_.numel() - split_;
  }
  /// Differs where texts differ.
  uint64_t fingerprint() const {
    return fingerprint_;
  }

 private:
  Batch cut(const std::vector<int64_t>& starts) const;

  torch::Tensor text_; // bytes
  int64_t sequence_;
  int64_t rows_per_rank_;
  int64_t split_; // where the held-back part begins
  int64_t windows_;
  uint64_t fingerprint_;
};

} // namespace train_gpt
