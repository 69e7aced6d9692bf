#include "engine/bucket.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/where.h>

#include "base/phrase.h"
#include "base/tensor_at.h"
#include "engine/group_users.h"
#include "engine/put_together.h"
#include "engine/unit.h"

namespace fsdp::engine {

Bucket::Bucket(const Unit& unit, Mesh mesh) : unit_(unit), mesh_(std::move(mesh)) {
  shard_group_ = mesh_.group(mesh_.ndim() - 1);
  if (mesh_.ndim() == 2) {
    replicate_group_ = mesh_.group(0);
  }
  gather_group = shard_group_;
  reduce_group = shard_group_;
}

Bucket::~Bucket() {
  if (gathered_) {
    gathered_->abandon();
  }
}

c10::ScalarType Bucket::gathered_dtype(c10::ScalarType stored) const {
  return c10::isFloatingType(stored) ? unit_.precision().param_dtype.value_or(stored) : stored;
}

void Bucket::add(Param* param, std::shared_ptr<GatherExtension>) {
  params_.push_back(param);
}

bool Bucket::reads_in_place() const {
  return gather_group->gathers_in_place() && std::any_of(params_.begin(), params_.end(), [](const Param* param) {
           return param->shard_dtype() == param->gathered_dtype();
         });
}

bool Bucket::gathers_together() const {
  const bool casts = std::any_of(
      params_.begin(), params_.end(), [](const Param* p) { return p->shard_dtype() != p->gathered_dtype(); });
  return casts || !gather_group->gathers_in_place();
}

bool Bucket::has_values() const {
  return std::any_of(params_.begin(), params_.end(), [](const Param* param) { return !param->on_meta(); });
}

void Bucket::settle(const Label& label) {
  group_users::stop_readers(*gather_group);
  drop_share();
  const bool pin = unit_.offloaded() && unit_.offload_policy()->pin_memory;
  auto home = gather_group->make_home(pieces(), {unit_.device(), unit_.offloaded(), pin}, label);
  home->begin_write(label);
  const c10::Device device = unit_.offloaded() ? c10::Device(c10::kCPU) : unit_.device();
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i]->on_meta()) {
      params_[i]->move_shard(slice(*home, i), home, device);
    }
  }
  home_ = std::move(home);
  for (Param* param : params_) {
    const auto gathered = gathered_dtype(param->shard_dtype());
    if (gathered != param->gathered_dtype()) {
      param->become_handle(param->handle(), gathered);
      if (is_private()) { // while a guard shows it
        place(*param);
      }
    }
  }
  if (gather_group->gathers_in_place()) {
    // Once together, so that from now on a rank may read alone: ranks may begin with different units.
    home_->gather(label)->wait();
  }
}

std::vector<Piece> Bucket::pieces() const {
  std::vector<Piece> pieces;
  for (const Param* param : params_) {
    const auto stored = param->shard_dtype();
    pieces.push_back({param->layout().numel(), param->layout().cut().chunk, stored, gathered_dtype(stored)});
  }
  return pieces;
}

void* Bucket::slice(const Home& home, size_t index) const {
  return home.slice(index);
}

void* Bucket::whole(const Gathered& gathered, size_t index) const {
  return gathered.piece(index);
}

bool Bucket::lies_well(const Param& param) const {
  return param.layout().in_place();
}

void Bucket::settle_among(int ranks, const Label& label) {
  // Otherwise gathering again costs nothing, or as much.
  const bool worth_it = !gather_group->gathers_in_place() && ranks < gather_group->size();
  neighbours_ =
      worth_it ? gather_group->part(gather_group->rank() / ranks, phrase("neighbours {}", ranks), label) : nullptr;
  if (neighbours_ && neighbours_->size() > 1 && neighbours_->gathers_in_place()) {
    neighbours_ = nullptr; // to make a home there for each share would cost more than another gather
  }
}

std::vector<Piece> Bucket::pieces_among_neighbours() const {
  std::vector<Piece> pieces;
  for (const Param* param : params_) {
    const int64_t numel = param->layout().numel(), ranks = neighbours_->size();
    pieces.push_back({numel, (numel + ranks - 1) / ranks, param->gathered_dtype(), param->gathered_dtype()});
  }
  return pieces;
}

void Bucket::keep_share(const Label& label) {
  if (!neighbours_ || !gathered_) {
    return;
  }
  const auto pieces = pieces_among_neighbours();
  share_ = neighbours_->make_home(pieces, {unit_.device()}, label);
  for (size_t i = 0; i < params_.size(); ++i) {
    const int64_t begin = pieces[i].begin(neighbours_->rank()), length = pieces[i].length(neighbours_->rank());
    auto whole = params_[i]->flat_view_of_whole(this->whole(*gathered_, i));
    tensor_at(share_->slice(i), {length}, whole.options()).copy_(whole.narrow(0, begin, length));
  }
}

void Bucket::gather(const Label& label) {
  const auto share = std::exchange(share_, nullptr);
  gathered_ = (share ? share : home_)->gather(label);
}

void Bucket::wait() {
  gathered_->wait();
  unpacked_.resize(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    Param& param = *params_[i];
    if (!lies_well(param)) {
      unpacked_[i] = param.layout().unpack(param.flat_view_of_whole(whole(*gathered_, i)));
    }
    param.set_whole(memory_of(i));
  }
}

void Bucket::wait_unseen() {
  if (gathered_) {
    gathered_->wait();
  }
}

void* Bucket::memory_of(size_t index) const {
  if (index < unpacked_.size() && unpacked_[index].defined()) {
    return unpacked_[index].data_ptr();
  }
  return gathered_ ? whole(*gathered_, index) : nullptr;
}

size_t Bucket::index_of(const Param& param) const {
  return std::find(params_.begin(), params_.end(), &param) - params_.begin();
}

void Bucket::place(Param& param) {
  if (is_private()) {
    param.show_copy(private_copy(param));
  } else {
    param.set_whole(unpacked_.empty() ? nullptr : memory_of(index_of(param)));
  }
}

void Bucket::release() {
  for (Param* param : params_) {
    param->set_whole(nullptr);
    param->end_copy();
  }
  gathered_.reset();
  unpacked_.clear();
  private_.clear();
  may_be_written_ = false;
}

std::vector<at::Tensor> Bucket::put_together(c10::Device target, const Label& label) const {
  std::vector<PieceOf> pieces;
  for (const Param* param : params_) {
    pieces.push_back({param, param->shard().detach()});
  }
  return engine::put_together(pieces, target, label);
}

void Bucket::make_private() {
  check_writable();
  std::vector<at::Tensor> copies;
  for (size_t i = 0; i < params_.size(); ++i) {
    copies.push_back(params_[i]->view_as_whole(memory_of(i)).clone());
  }
  make_private(std::move(copies));
}

void Bucket::make_private(std::vector<at::Tensor> copies) {
  private_ = std::move(copies);
  gathered_.reset();
  unpacked_.clear();
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i]->show_copy(private_[i]);
  }
}

void Bucket::replace_private_copy(Param& param, const at::Tensor& data) {
  at::Tensor& copy = private_[index_of(param)];
  copy = at::empty_strided(copy.sizes(), copy.strides(), copy.options()).copy_(data); // others may hold the former one
  param.set_whole(copy.data_ptr());
}

void Bucket::write_back() {
  if (!std::exchange(may_be_written_, false)) {
    return;
  }
  begin_write();
  for (size_t i = 0; i < params_.size(); ++i) {
    write_back(i);
  }
}

void Bucket::write_back(const Param& param) {
  begin_write();
  write_back(index_of(param));
}

void Bucket::write_back_alone(const Param* only) {
  if (is_private() && !gather_group->gathers_in_place()) {
    begin_write();
  }
  for (size_t i = 0; i < private_.size(); ++i) {
    if (only == nullptr || only == params_[i] || flat_shard() != nullptr) {
      write_back(i);
    }
  }
}

void Bucket::write_back(size_t index) {
  Param& param = *params_[index];
  const at::Tensor& whole = private_[index];
  const auto& layout = param.layout();
  if (param.on_meta() || param.shard_was_replaced()) { // what users have put there is newer
    return;
  }
  auto slices = layout.in_place() ? whole.as_strided({layout.numel()}, {1}) : layout.pack(whole);
  auto mine = slices.narrow(0, layout.cut().begin(param.rank()), layout.cut().length(param.rank()));
  auto shard = param.shard();
  auto written = mine.as_strided(shard.sizes(), shard.strides(), mine.storage_offset());
  if (written.scalar_type() != shard.scalar_type()) { // what was not changed keeps the digits that were not gathered
    written = written.to(shard.device());
    written = at::where(written.eq(shard.to(written.scalar_type())), shard, written.to(shard.scalar_type()));
  }
  shard.copy_(written);
}

void Bucket::move_waiting_gradients(WaitingMove move) {
  for (Param* param : params_) {
    param->move_waiting_gradient(move);
  }
}

void Bucket::values_change(Param& param) {
  param.values_change();
}

void Bucket::begin_write() {
  drop_share(); // of the former value
  group_users::stop_readers(*gather_group);
  if (home_) { // not on meta
    home_->begin_write(unit_.label("write shards"));
  }
}

int64_t Bucket::bytes() const {
  int64_t total = gathered_ ? gathered_->bytes() : 0;
  if (share_) {
    for (const Piece& piece : pieces_among_neighbours()) {
      total += piece.length(neighbours_->rank()) * static_cast<int64_t>(c10::elementSize(piece.gathered));
    }
  }
  for (const auto* tensors : {&unpacked_, &private_}) {
    for (const auto& tensor : *tensors) {
      const bool pays = tensor.defined() && tensor.device().type() == unit_.device().type();
      total += pays ? static_cast<int64_t>(tensor.nbytes()) : 0;
    }
  }
  return total;
}

} // namespace fsdp::engine
