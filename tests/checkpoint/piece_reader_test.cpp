// Elements that are put together from pieces in many files.

#include <filesystem>
#include <iterator>

#include <gtest/gtest.h>
#include <torch/types.h>

#include "checkpoint/crc32c.h"
#include "checkpoint/file.h"
#include "checkpoint/piece_reader.h"
#include "support/error_message.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

int64_t open_files() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

TEST(PieceReader, HasFewFilesOpenHoweverManyThereAre) {
  constexpr int64_t kFiles = 80, kMostOpen = 32;
  const detail::TemporaryFolder folder;
  disk::CheckpointIndex index{.block_bytes = 16};
  auto& tensor = index.tensors["model/x"] = {torch::kFloat, {kFiles}, {1}};
  for (int64_t i = 0; i < kFiles; ++i) {
    const auto value = static_cast<float>(i);
    const std::string name = "rank-" + std::to_string(i);
    disk::write_text((folder.path() / name).string(), {reinterpret_cast<const char*>(&value), sizeof(value)});
    tensor.pieces.push_back({name, 0, {i, 1, 1, 1}, {disk::crc32c(&value, sizeof(value))}});
  }
  const int64_t before = open_files();
  disk::PieceReader reader(folder.path().string(), index);
  for (int again = 0; again < 2; ++again) {
    EXPECT_TRUE(reader.read_whole("model/x").equal(torch::arange(double{kFiles}, torch::kFloat)));
    EXPECT_LE(open_files() - before, kMostOpen);
  }
}

disk::CheckpointIndex index_of_file(const std::string& folder, const at::Tensor& values) {
  disk::write_text(folder + "/file", {static_cast<const char*>(values.const_data_ptr()), values.nbytes()});
  disk::CheckpointIndex index;
  index.tensors["model/x"] = {
      values.scalar_type(), {values.numel()}, {1}, {{"file", 0, Extent::one_run(0, values.numel()), {}}}};
  return index;
}

TEST(PieceReader, RefusesATensorThatHasNotAsManyElementsAsItsExtent) {
  const detail::TemporaryFolder folder;
  const auto index = index_of_file(folder.path().string(), torch::arange(8.0, torch::kFloat));
  disk::PieceReader reader(folder.path().string(), index);
  const HeldTensor here{
      .sizes = {8}, .strides = {1}, .extent = Extent::one_run(0, 8), .local = torch::zeros({2}, torch::kFloat)};
  const auto message = error_message([&] { reader.read("model/x", here); });
  EXPECT_TRUE(contains(message, "has 8 elements of 'model/x', but the tensor for them has 2")) << message;
}

TEST(PieceReader, ReadsInTheDtypeThatIsAskedForOrInTheOneThatWasSaved) {
  const detail::TemporaryFolder folder;
  const at::Tensor values = torch::arange(8.0, torch::kFloat) / 3;
  const auto index = index_of_file(folder.path().string(), values);
  disk::PieceReader reader(folder.path().string(), index);
  const HeldTensor here{
      .sizes = {8}, .strides = {1}, .extent = Extent::one_run(0, 8), .local = torch::zeros({8}, torch::kBFloat16)};
  EXPECT_TRUE(reader.read("model/x", here).local.equal(values.to(torch::kBFloat16)));
  EXPECT_TRUE(reader.read_as_saved("model/x", here).local.equal(values));
}

} // namespace
} // namespace fsdp::testing
