#include <cstring>

#include "comm/arguments.h"
#include "comm/shm/core.h"

namespace fsdp::shm {
namespace {

bool fits_in_post(const at::Tensor& tensor) {
  return tensor.nbytes() <= Post::kBytes;
}

void fetch(const Core& core, const at::Tensor& tensor, int root, uint64_t number, const Label& label) {
  core.members->read_others(label, [&] {
    const Post& post = core.collectives.post_of(root, number);
    const char* source = fits_in_post(tensor) ? reinterpret_cast<const char*>(post.words)
                                              : Publication::find(core.reach, post, root, 0, 1);
    std::memcpy(tensor.mutable_data_ptr(), source, tensor.nbytes());
  });
}

} // namespace

void broadcast(const CorePointer& core, const at::Tensor& tensor, int root, const Label& label) {
  const Members& members = *core->members;
  check_plain_memory(tensor, label);
  check_on_cpu(tensor, label);
  check_root(root, members.size(), label);
  Collectives& collectives = core->collectives;
  Post& post = collectives.prepare(label, Fingerprint("broadcast", label, tensor.nbytes(), tensor.scalar_type(), root));

  const bool is_root = members.rank() == root;
  const bool is_empty = tensor.nbytes() == 0; // and has no memory
  std::shared_ptr<char> block;
  bool must_outlast = false; // the others read the tensor itself
  if (is_root && !is_empty) {
    const auto* memory = static_cast<const char*>(tensor.const_data_ptr());
    if (fits_in_post(tensor)) {
      std::memcpy(post.words, memory, tensor.nbytes());
    } else {
      block = Publication(core->reach, post, {{memory, tensor.nbytes(), 0, 0}}).block;
      must_outlast = block == nullptr;
    }
  }
  const uint64_t number = collectives.commit(/*steps=*/2);
  collectives.keep(number, must_outlast ? Collectives::Lent{{tensor}, nullptr} : Collectives::Lent{{}, block});
  const auto run = [&] {
    if (!is_root && !is_empty) {
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
  collectives.release_kept();
}

} // namespace fsdp::shm
