#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "comm/shm/control.h"

/// What is where in the memory that the explored ranks share.
namespace fsdp::testing {

constexpr int kMostRanks = 4;
inline std::array<uint8_t, kMostRanks> dead; // what `has_ended` looks at

inline bool is_of_dead(const void* address) {
  const auto* at = static_cast<const uint8_t*>(address);
  return at >= dead.data() && at < dead.data() + dead.size();
}

struct Region {
  const char* begin;
  size_t bytes;
};

enum class Place { kElsewhere, kQuiet, kBell, kPost, kStep };

// What is where in a group's control segment; the first region that a run makes.
struct ControlMap {
  const char* base = nullptr;

  struct Found {
    int rank = -1;
    size_t offset = 0; // in its slot, or in Control
  };
  Found find(const void* address) const {
    const auto offset = static_cast<size_t>(static_cast<const char*>(address) - base);
    const size_t slots = sizeof(shm::Control);
    if (offset < slots) {
      return {-1, offset};
    }
    return {static_cast<int>((offset - slots) / sizeof(shm::RankSlot)), (offset - slots) % sizeof(shm::RankSlot)};
  }
};

// Offsets by which steps are told apart, and named.
template <typename Field>
size_t offset_of(Field shm::RankSlot::*field) {
  alignas(shm::RankSlot) static char memory[sizeof(shm::RankSlot)];
  const auto* slot = reinterpret_cast<const shm::RankSlot*>(memory);
  return static_cast<size_t>(reinterpret_cast<const char*>(&(slot->*field)) - memory);
}

std::string name_of(size_t offset);

} // namespace fsdp::testing
