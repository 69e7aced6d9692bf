#include <bit>
#include <utility>

#include "comm/arguments.h"
#include "comm/reduce.h"
#include "comm/shm/core.h"

namespace fsdp::shm {
namespace {

Fingerprint fingerprint(const ReduceScatter& args, const Label& label) {
  Fingerprint print("reduce_scatter", label, std::bit_cast<uint64_t>(args.divide_by));
  for (size_t i = 0; i < args.wholes.size(); ++i) {
    print.add(args.cuts[i].numel, args.cuts[i].chunk, args.cuts[i].before, args.wholes[i].scalar_type());
  }
  return print;
}

std::vector<Publication::Part> parts(const ReduceScatter& args, int rank) {
  std::vector<Publication::Part> parts;
  for (size_t i = 0; i < args.wholes.size(); ++i) {
    const Cut& cut = args.cuts[i];
    const size_t size = args.wholes[i].element_size();
    const auto begin = static_cast<size_t>(cut.begin(rank)) * size;
    parts.push_back(
        {static_cast<const char*>(args.wholes[i].const_data_ptr()),
         args.wholes[i].nbytes(),
         begin,
         begin + static_cast<size_t>(cut.length(rank)) * size});
  }
  return parts;
}

// What others read; a tensor that was copied for them is not.
Collectives::Lent lend(const Reach& reach, const ReduceScatter& args, const Publication& publication) {
  Collectives::Lent lent{.tensors = {}, .block = publication.block};
  for (const at::Tensor& whole : args.wholes) {
    if (reach.covers(whole.const_data_ptr())) {
      lent.tensors.push_back(whole);
    }
  }
  return lent;
}

// Sums this rank's slice of one tensor.
void sum_slice(const Core& core, const ReduceScatter& args, size_t index, uint64_t number) {
  const Cut& cut = args.cuts[index];
  const int rank = core.members->rank();
  if (cut.length(rank) == 0) {
    return;
  }
  const size_t offset = static_cast<size_t>(cut.begin(rank)) * args.wholes[index].element_size();
  std::vector<const void*> sources;
  for (int r = 0; r < core.members->size(); ++r) {
    const char* whole =
        r == rank ? static_cast<const char*>(args.wholes[index].const_data_ptr())
                  : Publication::find(core.reach, core.collectives.post_of(r, number), r, index, args.wholes.size());
    sources.push_back(whole + offset);
  }
  reduce(args.slices[index], sources, ReduceOp::kSum, args.divide_by);
}

} // namespace

std::unique_ptr<Work> reduce_scatter(const CorePointer& core, ReduceScatter args, const Label& label) {
  check_reduce_scatter(args, core->members->rank(), core->members->size(), label);
  if (!args.wholes.empty()) {
    check_on_cpu(args.wholes.front(), label);
    check_combines(args.wholes.front().scalar_type(), label);
  }
  Collectives& collectives = core->collectives;
  collectives.await_kept(Collectives::kMostKept, label);
  Post& post = collectives.prepare(label, fingerprint(args, label));
  const Publication publication(core->reach, post, parts(args, core->members->rank()));

  const uint64_t number = collectives.commit();
  Collectives::Lent lent = lend(core->reach, args, publication);
  const auto step = collectives.queue(
      {.number = number, .value = number, .run = [core = core.get(), args = std::move(args), label, number] {
         core->members->read_others(label, [&] {
           for (size_t i = 0; i < args.wholes.size(); ++i) {
             sum_slice(*core, args, i, number);
           }
         });
       }});
  return make_work(core, step, std::move(lent));
}

} // namespace fsdp::shm
