#pragma once

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace fsdp::testing {

/// An all-gather of strings among processes through files: needs no network. Every rank makes one for the same empty
/// folder.
class FileExchange {
 public:
  FileExchange(std::filesystem::path folder, int rank, int size)
      : folder_(std::move(folder)), rank_(rank), size_(size) {}

  std::vector<std::string> operator()(const std::string& mine) {
    ++round_;
    write(mine);
    std::vector<std::string> all;
    for (int r = 0; r < size_; ++r) {
      all.push_back(read(r));
    }
    return all;
  }

 private:
  std::filesystem::path path(int rank) const {
    return folder_ / (std::to_string(round_) + "." + std::to_string(rank));
  }

  void write(const std::string& text) const {
    const std::filesystem::path unfinished = path(rank_).string() + ".unfinished";
    std::ofstream(unfinished, std::ios::binary) << text;
    std::filesystem::rename(unfinished, path(rank_)); // appears all at once
  }

  std::string read(int rank) const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!std::filesystem::exists(path(rank))) {
      if (std::chrono::steady_clock::now() > deadline) {
        throw std::runtime_error("rank " + std::to_string(rank) + " did not come to the exchange of files");
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::ifstream file(path(rank), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::filesystem::path folder_;
  int rank_;
  int size_;
  int round_ = 0;
};

} // namespace fsdp::testing
