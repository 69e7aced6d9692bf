#include "comm/shm/reach.h"

#include <new>
#include <utility>

namespace fsdp::shm {
namespace {

constexpr std::align_val_t kAlignment{64};

} // namespace

Reach::Reach(const Members& members, std::vector<std::shared_ptr<Segment>> arenas)
    : one_process_(members.one_process()), arenas_(std::move(arenas)) {}

uint64_t Reach::word(const void* memory) const {
  return one_process_ ? reinterpret_cast<uint64_t>(memory) : Arena::of_process().offset(memory);
}

const char* Reach::at(int rank, uint64_t word) const {
  if (one_process_) {
    return reinterpret_cast<const char*>(word);
  }
  const auto& arena = arenas_[static_cast<size_t>(rank)];
  return (arena ? arena->readable() : Arena::of_process().base()) + word;
}

std::shared_ptr<char> Reach::take(size_t bytes) const {
  if (one_process_) {
    return {static_cast<char*>(::operator new(bytes, kAlignment)), [](char* memory) {
              ::operator delete(memory, kAlignment);
            }};
  }
  Arena& arena = Arena::of_process();
  if (bytes >= Arena::kSmallestBlock) {
    arena.serve_tensors(); // what the caller copies to here had better lie here the next time
  }
  return {static_cast<char*>(arena.take(bytes)), [](char* memory) { Arena::of_process().give_back(memory); }};
}

} // namespace fsdp::shm
