#include "comm/shm/publication.h"

#include <cstring>

#include "comm/shm/whole.h"

namespace fsdp::shm {
namespace {

void copy_foreign(char* to, const Publication::Part& part) {
  if (part.bytes == 0) { // neither has an address
    return;
  }
  std::memcpy(to, part.memory, part.own_begin);
  std::memcpy(to + part.own_end, part.memory + part.own_end, part.bytes - part.own_end);
}

} // namespace

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
