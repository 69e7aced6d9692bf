#include "engine/put_together.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include "engine/bucket.h"
#include "engine/internal_scope.h"
#include "engine/unit.h"

namespace fsdp::engine {

namespace {

at::Tensor laid_out(const layout::DimLayout& layout, const at::Tensor& slices) {
  auto whole = at::empty_strided(layout.sizes(), layout.strides(), slices.options());
  if (layout.in_place()) {
    at::as_strided(whole, {layout.numel()}, {1}).copy_(slices);
  } else {
    layout.unpack(slices, whole);
  }
  return whole;
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
    shapes.push_back({param->layout().numel(), param->layout().chunk(), local.scalar_type(), local.scalar_type()});
  }
  const auto home = group.make_home(shapes, {device}, label);
  home->begin_write(label);
  for (size_t i = 0; i < pieces.size(); ++i) {
    const auto& [param, local] = pieces[i];
    const auto& layout = param->layout();
    const auto on_device = at::TensorOptions().dtype(local.scalar_type()).device(device);
    at::from_blob(home->slice(i), layout.shard_sizes(param->rank()), layout.shard_strides(param->rank()), on_device)
        .copy_(local);
  }
  const auto gathered = home->gather(label);
  gathered->wait();
  std::vector<at::Tensor> wholes;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Param& param = *pieces[i].param;
    const auto slices = param.flat_view_of_whole(gathered->piece(i), shapes[i].stored, device);
    wholes.push_back(laid_out(param.layout(), slices).to(target));
  }
  group.exchange("", label); // nobody reads this rank's slices any more
  return wholes;
}

} // namespace fsdp::engine
