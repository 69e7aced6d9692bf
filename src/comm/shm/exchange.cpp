#include <algorithm>
#include <cstring>

#include "comm/shm/core.h"

namespace fsdp::shm {
namespace {

// Words of a post: the number of bytes, flags, and then the bytes, or where they are.
constexpr uint64_t kWriting = 1; // the rank is in a write phase
constexpr uint64_t kUnseen = 2; // in a time in which ranks may write and not say so
constexpr size_t kBytesInPost = Post::kBytes - 2 * sizeof(uint64_t);

std::shared_ptr<char> fill(Post& post, const Core& core, const std::string& bytes) {
  post.words[0] = bytes.size();
  post.words[1] = (core.phases.writing() ? kWriting : 0) | (core.unseen_writes.last() ? kUnseen : 0);
  if (bytes.size() <= kBytesInPost) {
    std::memcpy(&post.words[2], bytes.data(), bytes.size());
    return nullptr;
  }
  auto block = core.reach.take(bytes.size());
  std::memcpy(block.get(), bytes.data(), bytes.size());
  post.words[2] = core.reach.word(block.get());
  return block;
}

std::string read(const Core& core, int rank, uint64_t number) {
  const Post& post = core.collectives.post_of(rank, number);
  const size_t bytes = post.words[0];
  const char* source =
      bytes <= kBytesInPost ? reinterpret_cast<const char*>(&post.words[2]) : core.reach.at(rank, post.words[2]);
  return {source, bytes};
}

} // namespace

std::vector<std::string> exchange(
    const CorePointer& core, const std::string& bytes, const Label& label, uint64_t agreed) {
  Post& post = core->collectives.prepare(label, Fingerprint("exchange", label, agreed));
  const auto block = fill(post, *core, bytes);
  core->phases.publish_writes();
  core->unseen_writes.leave();

  std::vector<std::string> all;
  uint64_t flags_of_all = kWriting | kUnseen;
  const uint64_t number = core->collectives.commit();
  core->collectives.keep(number, {.tensors = {}, .block = block});
  const auto read_all = [&, core = core.get()] {
    for (int r = 0; r < core->members->size(); ++r) {
      all.push_back(read(*core, r, number));
      flags_of_all &= core->collectives.post_of(r, number).words[1];
    }
  };
  const auto run = [&] { core->members->read_others(label, read_all); };
  core->collectives.finish(core->collectives.queue({.number = number, .value = number, .run = run}));
  core->collectives.release_kept();
  core->phases.resume((flags_of_all & kWriting) != 0);
  core->unseen_writes.resume((flags_of_all & kUnseen) != 0);
  return all;
}

} // namespace fsdp::shm
