#include "comm/arguments.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include "base/check.h"

namespace fsdp {
namespace {

void check_cut(const Cut& cut, size_t index, int size, const Label& label) {
  FSDP_CHECK(
      cut.numel >= 0 && cut.before >= 0 && cut.chunk >= 0 && cut.chunk * size >= cut.before + cut.numel,
      "[{}] expected chunks that cover the whole tensor on {} ranks, but tensor {} has {} elements after {} others and "
      "chunks of {}; use at least its size divided by the ranks, rounded up",
      label.operation,
      size,
      index,
      cut.numel,
      cut.before,
      cut.chunk);
}

// Where parts of one tensor lie in a rank's share follows from the order of the list.
void check_follows(const std::vector<Cut>& cuts, size_t index, const Label& label) {
  const Cut& cut = cuts[index];
  const bool is_part = index > 0 && cut.before > 0;
  FSDP_CHECK(
      !is_part || (cut.chunk == cuts[index - 1].chunk && cut.before >= cuts[index - 1].before + cuts[index - 1].numel),
      "[{}] expected tensor {} to lie behind the one before it in what both are parts of, and in equal chunks; give "
      "the "
      "parts of each flat parameter in their order",
      label.operation,
      index);
}

bool alike(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device();
}

std::string kind(const at::Tensor& tensor) {
  return phrase("{} on {}", tensor.scalar_type(), tensor.device());
}

} // namespace

void check_pieces(const std::vector<Piece>& pieces, int size, const Label& label) {
  for (size_t i = 0; i < pieces.size(); ++i) {
    check_cut({pieces[i].numel, pieces[i].chunk}, i, size, label);
  }
}

void check_reduce_scatter(const ReduceScatter& args, int rank, int size, const Label& label) {
  const size_t count = args.wholes.size();
  FSDP_CHECK(
      args.cuts.size() == count && args.slices.size() == count,
      "[{}] expected one cut and one slice for each of {} tensors, got {} cuts and {} slices",
      label.operation,
      count,
      args.cuts.size(),
      args.slices.size());
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor& whole = args.wholes[i];
    const at::Tensor& slice = args.slices[i];
    const Cut& cut = args.cuts[i];
    FSDP_CHECK(
        whole.numel() == cut.numel,
        "[{}] expected tensor {} to have the {} elements of its cut, got {}",
        label.operation,
        i,
        cut.numel,
        whole.numel());
    check_cut(cut, i, size, label);
    check_follows(args.cuts, i, label);
    check_plain_memory(whole, label);
    check_plain_memory(slice, label);
    FSDP_CHECK(
        slice.numel() == cut.length(rank),
        "[{}] expected a slice of {} elements for tensor {}, got {}",
        label.operation,
        cut.length(rank),
        i,
        slice.numel());
    FSDP_CHECK(
        alike(whole, args.wholes[0]) && alike(slice, whole),
        "[{}] expected tensors and slices of one dtype and on one device, got {}, {} and {}; reduce each dtype by "
        "itself",
        label.operation,
        kind(args.wholes[0]),
        kind(whole),
        kind(slice));
  }
}

void check_all_reduce(const at::Tensor& tensor, ReduceOp op, const Label& label) {
  check_plain_memory(tensor, label);
  FSDP_CHECK(
      op == ReduceOp::kSum || !tensor.is_complex(),
      "[{}] complex numbers have no order; reduce them by sum",
      label.operation);
}

void check_plain_memory(const at::Tensor& tensor, const Label& label) {
  FSDP_CHECK(
      tensor.layout() == c10::kStrided,
      "[{}] expected a dense tensor, got one of layout {}; call to_dense()",
      label.operation,
      tensor.layout());
  FSDP_CHECK(
      !tensor.is_conj() && !tensor.is_neg(),
      "[{}] expected a tensor whose memory has its values, got a view that negates or conjugates them; call "
      "resolve_conj() and resolve_neg()",
      label.operation);
  FSDP_CHECK(
      tensor.is_contiguous(),
      "[{}] expected a contiguous tensor, got strides {} for sizes {}; call contiguous()",
      label.operation,
      tensor.strides(),
      tensor.sizes());
}

void check_on_cpu(const at::Tensor& tensor, const Label& label) {
  FSDP_CHECK(
      tensor.is_cpu(),
      "[{}] expected a tensor on the CPU, whose memory the ranks share, got one on {}; move it there",
      label.operation,
      tensor.device());
}

void check_root(int root, int size, const Label& label) {
  FSDP_CHECK(root >= 0 && root < size, "[{}] expected a root from 0 to {}, got {}", label.operation, size - 1, root);
}

std::vector<int> ranks_of_color(Group& group, int color, const Label& label) {
  const std::string mine = std::to_string(color);
  const auto colors = group.exchange(mine, label);
  std::vector<int> ranks;
  for (int rank = 0; rank < group.size(); ++rank) {
    if (colors[rank] == mine) {
      ranks.push_back(rank);
    }
  }
  return ranks;
}

void announce_write(const at::Tensor& tensor) {
  if (tensor.key_set().has(c10::DispatchKey::DeferredInit)) { // else nobody watches
    static const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("fsdp::note_write_", "").typed<void(const at::Tensor&)>();
    op.call(tensor);
  }
}

} // namespace fsdp
