#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace fsdp::shm {

/// A short text in shared memory that others may read at any moment: they may see a mix of two texts, never anything
/// worse. Too long texts lose their beginning, since the end of a unit's name tells more.
template <size_t kBytes>
class Text {
 public:
  void store(std::string_view text) {
    text.remove_prefix(text.size() - std::min(text.size(), kBytes - 1));
    const size_t words = text.size() / 8 + 1; // with the closing zero
    for (size_t i = 0; i < words; ++i) {
      uint64_t word = 0;
      std::memcpy(&word, text.data() + 8 * i, std::min<size_t>(8, text.size() - 8 * i));
      words_[i].store(word, std::memory_order_relaxed);
    }
  }

  std::string load() const {
    std::array<char, kBytes> bytes;
    for (size_t i = 0; i < words_.size(); ++i) {
      const uint64_t word = words_[i].load(std::memory_order_relaxed);
      std::memcpy(bytes.data() + 8 * i, &word, 8);
    }
    return {bytes.data(), strnlen(bytes.data(), kBytes)};
  }

 private:
  static_assert(kBytes % 8 == 0);
  std::array<std::atomic<uint64_t>, kBytes / 8> words_;
};

} // namespace fsdp::shm
