// Elements that are put together from pieces in many files.

#include <filesystem>
#include <iterator>

#include <gtest/gtest.h>
#include <torch/types.h>

#include "checkpoint/crc32c.h"
#include "checkpoint/file.h"
#include "checkpoint/piece_reader.h"
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

} // namespace
} // namespace fsdp::testing
