#include <bit>
#include <cstring>
#include <utility>

#include <ATen/ops/from_blob.h>

#include "comm/arguments.h"
#include "comm/reduce.h"
#include "comm/shm/core.h"
#include "comm/shm/whole.h"

namespace fsdp::shm {
namespace {

// What the steps of one all-reduce share.
struct AllReduce {
  const Core& core;
  at::Tensor tensor;
  ReduceOp op;
  double divide_by;
  Label label;
  uint64_t number = 0;
  char* place = nullptr; // where the others read this rank's tensor
  std::shared_ptr<char> block; // that it lies in, if it had to be copied

  char* memory() const {
    return static_cast<char*>(tensor.mutable_data_ptr());
  }
  // Each rank sums an equal part, of whole cache lines.
  Cut split() const {
    const int64_t share = (tensor.numel() + core.members->size() - 1) / core.members->size();
    return {tensor.numel(), static_cast<int64_t>(whole_lines(share))};
  }
  size_t begin_of(int rank) const {
    return static_cast<size_t>(split().begin(rank)) * tensor.element_size();
  }
  const char* tensor_of(int rank) const {
    return rank == core.members->rank()
               ? place
               : Publication::find(core.reach, core.collectives.post_of(rank, number), rank, 0, 1);
  }

  // All numbers lie in the posts: each rank sums them all.
  void combine_posts() const {
    std::vector<const void*> sources;
    for (int r = 0; r < core.members->size(); ++r) {
      sources.push_back(core.collectives.post_of(r, number).words);
    }
    reduce(tensor, sources, op, divide_by);
  }

  void combine_own_part() const {
    const int rank = core.members->rank();
    const at::Tensor part = at::from_blob(place + begin_of(rank), {split().length(rank)}, tensor.scalar_type());
    core.members->read_others(label, [&] {
      std::vector<const void*> sources;
      for (int r = 0; r < core.members->size(); ++r) {
        sources.push_back(tensor_of(r) + begin_of(rank));
      }
      reduce(part, sources, op, divide_by);
    });
  }

  void fetch_parts() const {
    core.members->read_others(label, [&] {
      for (int r = 0; r < core.members->size(); ++r) {
        const char* source = tensor_of(r) + begin_of(r);
        if (char* target = memory() + begin_of(r); target != source) {
          std::memcpy(target, source, static_cast<size_t>(split().length(r)) * tensor.element_size());
        }
      }
    });
  }
};

std::unique_ptr<Work> all_reduce_small(const CorePointer& core, AllReduce work, Post& post) {
  Collectives& collectives = core->collectives;
  if (work.tensor.numel() > 0) { // an empty tensor has no memory
    std::memcpy(post.words, work.memory(), work.tensor.nbytes());
  }
  work.number = collectives.commit();
  const uint64_t number = work.number;
  const auto step = collectives.queue({.number = number, .value = number, .run = [work] { work.combine_posts(); }});
  return make_work(core, step);
}

// Three steps: each rank sums its part where it lies; fetches the others' parts; and, if they were read out of the
// tensor itself, waits until they have been.
std::unique_ptr<Work> all_reduce_big(const CorePointer& core, AllReduce work, Post& post) {
  Collectives& collectives = core->collectives;
  const Publication publication(core->reach, post, {{work.memory(), work.tensor.nbytes(), 0, 0}});
  work.place = publication.places[0];
  work.block = publication.block;
  work.number = collectives.commit(/*steps=*/3);

  const uint64_t first = work.number;
  collectives.keep(first + 1, {{work.tensor}, work.block});
  collectives.queue({.number = first, .value = first, .run = [work] { work.combine_own_part(); }});
  collectives.queue(
      {.number = first + 1, .counter = &RankSlot::finished, .value = first, .run = [work] { work.fetch_parts(); }});
  const int depends_on = work.block ? core->members->rank() : -1;
  const auto last =
      collectives.queue({.number = first + 2, .root = depends_on, .counter = &RankSlot::finished, .value = first + 1});
  return make_work(core, last);
}

} // namespace

std::unique_ptr<Work> all_reduce(
    const CorePointer& core, at::Tensor tensor, ReduceOp op, double divide_by, const Label& label) {
  check_all_reduce(tensor, op, label);
  check_on_cpu(tensor, label);
  check_combines(tensor.scalar_type(), label);
  const Fingerprint print(
      "all_reduce", label, tensor.numel(), tensor.scalar_type(), op, std::bit_cast<uint64_t>(divide_by));
  core->collectives.await_kept(Collectives::kMostKept, label);
  Post& post = core->collectives.prepare(label, print);
  AllReduce work{*core, std::move(tensor), op, divide_by, label, 0, nullptr, nullptr};
  return work.tensor.nbytes() <= Post::kBytes ? all_reduce_small(core, std::move(work), post)
                                              : all_reduce_big(core, std::move(work), post);
}

} // namespace fsdp::shm
