// A rank's file, and what may change while it is written.

#include <functional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "checkpoint/piece_reader.h"
#include "checkpoint/piece_writer.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

/// Staged, changed and then written.
std::map<std::string, at::Tensor> what_is_written(
    const std::vector<disk::PieceToWrite>& pieces, int64_t most, const std::function<void()>& change) {
  const detail::TemporaryFolder folder;
  disk::CheckpointIndex index{.block_bytes = 16};
  {
    disk::PieceWriter writer(pieces, {folder.path().string(), "file", index.block_bytes});
    writer.stage(most, /*keep_memory=*/false);
    change();
    disk::Progress unseen;
    index.tensors = writer.finish(unseen);
  }
  disk::PieceReader reader(folder.path().string(), index);
  std::map<std::string, at::Tensor> written;
  for (const auto& [name, tensor] : index.tensors) {
    written[name] = reader.read_whole(name);
  }
  return written;
}

TEST(PieceWriter, WritesWhatWasThereWhenItWasStaged) {
  for (const int64_t most : {0, 64, 128, 256, 511, 512, 1 << 20}) {
    SCOPED_TRACE(most);
    std::vector<at::Tensor> tensors, before;
    std::vector<float> foreign(10, 3.0F);
    tensors.push_back(torch::arange(10, torch::kFloat));
    tensors.push_back(torch::arange(24, torch::kFloat).view({2, 12}).slice(1, 0, 12, 2)); // with gaps
    tensors.push_back(torch::imag(torch::complex(torch::ones(4), torch::arange(4, torch::kFloat)).conj()));
    tensors.push_back(torch::from_blob(foreign.data(), {10}));
    std::vector<disk::PieceToWrite> pieces;
    for (size_t i = 0; i < tensors.size(); ++i) {
      before.push_back(tensors[i].clone());
      pieces.push_back({std::to_string(i), held(tensors[i]), true, /*by_operators=*/true});
      pieces.push_back({"again " + std::to_string(i), held(tensors[i]), true, true});
    }
    const auto written = what_is_written(pieces, most, [&] {
      for (auto& tensor : tensors) {
        tensor.mul_(2).add_(1);
      }
    });
    for (size_t i = 0; i < tensors.size(); ++i) {
      EXPECT_TRUE(written.at(std::to_string(i)).equal(before[i])) << i;
      EXPECT_TRUE(written.at("again " + std::to_string(i)).equal(before[i])) << i;
    }
  }
}

TEST(PieceWriter, CopiesAtOnceWhatIsNotWrittenByOperatorsAlone) {
  at::Tensor tensor = torch::zeros(4);
  float* address = tensor.data_ptr<float>();
  const auto written =
      what_is_written({{"x", held(tensor), true, /*by_operators=*/false}}, 1 << 20, [&] { address[1] = 1; });
  EXPECT_TRUE(written.at("x").equal(torch::zeros(4)));
}

} // namespace
} // namespace fsdp::testing
