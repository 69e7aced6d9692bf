#include <cstring>

#include "base/check.h"
#include "comm/shm/publication.h"

namespace fsdp::shm {
namespace {

// Publishes the root's tensor; true if the others read the tensor itself.
bool publish_root(const Core& core, Post& post, const at::Tensor& tensor, std::shared_ptr<char>& block) {
  const char* memory = static_cast<const char*>(tensor.const_data_ptr());
  if (tensor.nbytes() <= Post::kBytes) {
    if (memory != nullptr) { // an empty tensor has no memory
      std::memcpy(post.words, memory, tensor.nbytes());
    }
    return false;
  }
  Publication publication(core.reach);
  publication.publish(post, {{memory, tensor.nbytes(), 0, 0}});
  block = publication.block();
  return block == nullptr;
}

void fetch(const Core& core, const at::Tensor& tensor, int root, uint64_t number, const Label& label) {
  if (tensor.numel() == 0) {
    return;
  }
  core.members->read_others(label, [&] {
    const Post& post = core.collectives.post_of(root, number);
    const char* source = tensor.nbytes() <= Post::kBytes ? reinterpret_cast<const char*>(post.words)
                                                         : Publication::find(core.reach, post, root, 0, 1);
    std::memcpy(tensor.mutable_data_ptr(), source, tensor.nbytes());
  });
}

} // namespace

void broadcast(const CorePointer& core, const at::Tensor& tensor, int root, const Label& label) {
  const Members& members = *core->members;
  FSDP_CHECK(tensor.is_contiguous(), "[", label.operation, "] expected a contiguous tensor; call contiguous()");
  FSDP_CHECK(
      root >= 0 && root < members.size(),
      "[",
      label.operation,
      "] expected a root below ",
      members.size(),
      ", got ",
      root);
  Fingerprint print("broadcast", label);
  print.add(tensor.nbytes()).add(static_cast<uint64_t>(tensor.scalar_type())).add(static_cast<uint64_t>(root));
  Collectives& collectives = core->collectives;
  Post& post = collectives.prepare(label, print);

  const bool is_root = members.rank() == root;
  std::shared_ptr<char> block;
  const bool must_outlast = is_root && publish_root(*core, post, tensor, block);
  const uint64_t number = collectives.commit(/*steps=*/2);
  collectives.keep(number, {}, block);
  const auto run = [&] {
    if (!is_root && tensor.nbytes() > 0) {
      fetch(*core, tensor, root, number, label);
    }
  };
  collectives.queue({.number = number, .root = root, .value = number, .run = run});
  // The root may change its tensor once all have read it. The others need not wait for each other.
  const auto last = collectives.queue(
      {.number = number + 1,
       .root = must_outlast ? -1 : members.rank(),
       .counter = &RankSlot::finished,
       .value = number});
  collectives.finish(last);
}

} // namespace fsdp::shm
