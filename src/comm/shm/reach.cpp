#include "comm/shm/reach.h"

#include <cstring>
#include <new>
#include <utility>

#include "comm/shm/whole.h"

namespace fsdp::shm {
namespace {

constexpr std::align_val_t kAlignment{kLine};

void copy_foreign(char* to, const Publication::Part& part) {
  if (part.bytes == 0) { // neither has an address
    return;
  }
  std::memcpy(to, part.memory, part.own_begin);
  std::memcpy(to + part.own_end, part.memory + part.own_end, part.bytes - part.own_end);
}

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

Publication::Publication(const Reach& reach, Post& post, const std::vector<Part>& parts) {
  const bool needs_table = parts.size() > Post::kWords;
  size_t bytes = needs_table ? whole_lines(parts.size() * sizeof(uint64_t)) : 0;
  for (const Part& part : parts) {
    bytes += reach.covers(part.memory) ? 0 : whole_lines(part.bytes);
  }
  block = bytes > 0 ? reach.take(bytes) : nullptr;

  char* free = block.get();
  uint64_t* words = post.words;
  if (needs_table) {
    post.words[0] = reach.word(free);
    words = reinterpret_cast<uint64_t*>(free);
    free += whole_lines(parts.size() * sizeof(uint64_t));
  }
  for (const Part& part : parts) {
    const bool covered = reach.covers(part.memory);
    char* place = covered ? const_cast<char*>(part.memory) : free;
    if (!covered) {
      copy_foreign(place, part);
      free += whole_lines(part.bytes);
    }
    *words++ = part.bytes > 0 ? reach.word(place) : 0;
    places.push_back(place);
  }
}

const char* Publication::find(const Reach& reach, const Post& post, int rank, size_t index, size_t count) {
  const uint64_t* words = post.words;
  if (count > Post::kWords) {
    words = reinterpret_cast<const uint64_t*>(reach.at(rank, post.words[0]));
  }
  return reach.at(rank, words[index]);
}

} // namespace fsdp::shm
