#include "engine/put_together.h"

#include <algorithm>

#include <ATen/ops/cat.h>

#include "base/tensor_at.h"
#include "engine/bucket.h"
#include "engine/internal_scope.h"
#include "engine/unit.h"

namespace fsdp::engine {

namespace {

// The ranks' slices may begin and end anywhere: each travels in as much room as the longest takes.
Piece piece_for(const Param& param, c10::ScalarType dtype, int ranks) {
  int64_t longest = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    longest = std::max(longest, param.layout().cut().length(rank));
  }
  return {longest * ranks, longest, dtype, dtype};
}

at::Tensor slices_in(const at::Tensor& rows, const Cut& cut, const Piece& piece) {
  if (cut.before == 0) {
    return rows.narrow(0, 0, cut.numel);
  }
  std::vector<at::Tensor> slices;
  for (int64_t rank = 0; rank * piece.chunk < piece.numel; ++rank) {
    slices.push_back(rows.narrow(0, rank * piece.chunk, cut.length(static_cast<int>(rank))));
  }
  return slices.empty() ? rows : at::cat(slices);
}

} // namespace

// What is offloaded travels over the device, which is what the group serves.
std::vector<at::Tensor> put_together(const std::vector<PieceOf>& pieces, c10::Device target, const Label& label) {
  if (pieces.empty()) {
    return {};
  }
  InternalScope scope;
  Group& group = pieces[0].param->bucket().shard_group();
  const c10::Device device = pieces[0].param->unit().device();
  std::vector<Piece> shapes;
  for (const auto& [param, local] : pieces) {
    shapes.push_back(piece_for(*param, local.scalar_type(), group.size()));
  }
  const auto home = group.make_home(shapes, {device}, label);
  home->begin_write(label);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto& [param, local] = pieces[i];
    const auto& layout = param->layout();
    const auto on_device = at::TensorOptions().dtype(local.scalar_type()).device(device);
    tensor_at(home->slice(i), layout.shard_sizes(param->rank()), layout.shard_strides(param->rank()), on_device)
        .copy_(local);
  }
  const auto gathered = home->gather(label);
  gathered->wait();
  std::vector<at::Tensor> wholes;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Param& param = *pieces[i].param;
    const auto options = at::TensorOptions().dtype(shapes[i].stored).device(device);
    const auto rows = tensor_at(gathered->piece(i), {shapes[i].numel}, options);
    wholes.push_back(param.layout().unpack(slices_in(rows, param.layout().cut(), shapes[i])).to(target));
  }
  group.exchange("", label); // nobody reads this rank's slices any more
  return wholes;
}

} // namespace fsdp::engine
