#include "engine/extended_bucket.h"

#include <sstream>

#include <ATen/ops/empty_strided.h>

#include "base/check.h"
#include "base/tensor_at.h"
#include "engine/agreement.h"
#include "engine/internal_scope.h"
#include "engine/unit.h"

namespace fsdp::engine {

namespace {

std::string described(const std::vector<at::Tensor>& tensors) {
  std::ostringstream text;
  for (const auto& tensor : tensors) {
    text << " " << tensor.sizes() << " " << tensor.scalar_type();
  }
  return text.str();
}

} // namespace

int64_t ExtendedBucket::Sent::bytes() const {
  return c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
}

std::vector<int64_t> ExtendedBucket::Sent::sizes_of_all(int ranks) const {
  auto all = sizes.empty() ? std::vector<int64_t>{1} : sizes;
  all[0] *= ranks;
  return all;
}

std::vector<at::Tensor> ExtendedBucket::Extended::made_before_gather() const {
  OutermostScope scope;
  return extension->before_gather(param.shard());
}

void ExtendedBucket::add(Param* param, std::shared_ptr<GatherExtension> extension) {
  Bucket::add(param, nullptr);
  param->leave_whole();
  all_.push_back({*param, std::move(extension)});
}

void ExtendedBucket::settle(const Label& label) {
  size_t piece = 0;
  for (Extended& each : all_) {
    if (!each.param.on_meta()) {
      settle(each);
    }
    each.first_piece = piece;
    piece += each.sent.size();
  }
  check_alike(label);
  home_ = gather_group->make_home(pieces(), {unit_.device(), false, false, /*rewritten=*/true}, label);
}

void ExtendedBucket::settle(Extended& each) {
  each.param.settle_shard_in_place();
  for (const auto& tensor : each.extension->stored()) {
    each.param.watch(tensor);
  }
  each.sent.clear();
  for (const auto& tensor : each.made_before_gather()) {
    each.sent.emplace_back(tensor);
  }
}

// Ranks that send different sizes would wait for one another, or mix up what they got.
void ExtendedBucket::check_alike(const Label& label) const {
  std::ostringstream mine;
  for (const Extended& each : all_) {
    mine << each.param.name() << ":";
    for (const Sent& sent : each.sent) {
      mine << " " << c10::IntArrayRef(sent.sizes) << " " << sent.dtype;
    }
    mine << "\n";
  }
  const auto other = find_other_texts(*gather_group, {mine.str()}, label)[0];
  FSDP_CHECK(
      !other,
      "[before all-gather] extensions have to send tensors of the same sizes and dtypes on every rank, but rank {} and "
      "rank {} send\n{}against\n{}Where a parameter is not cut evenly, pad what is sent to the size of the first "
      "rank's shard",
      gather_group->rank(),
      other->rank,
      mine.str(),
      other->text);
}

std::vector<Piece> ExtendedBucket::pieces() const {
  std::vector<Piece> pieces;
  for (const Extended& each : all_) {
    for (const Sent& sent : each.sent) {
      pieces.push_back({sent.bytes() * gather_group->size(), sent.bytes(), c10::kByte, c10::kByte});
    }
  }
  return pieces;
}

void ExtendedBucket::gather(const Label& label) {
  home_->begin_write(label);
  for (const Extended& each : all_) {
    if (!each.sent.empty()) {
      write(each, each.made_before_gather());
    }
  }
  gathered_ = home_->gather(label);
}

void ExtendedBucket::write(const Extended& each, const std::vector<at::Tensor>& tensors) {
  const auto& expected = each.sent;
  const bool same = std::equal(
      tensors.begin(), tensors.end(), expected.begin(), expected.end(), [](const at::Tensor& tensor, const Sent& sent) {
        return Sent(tensor) == sent;
      });
  FSDP_CHECK(
      same,
      "[before all-gather] the extension of '{}' has to send tensors of the same sizes and dtypes every time; it sends "
      "now{}, which is something else than when the parameter was given its values",
      each.param.name(),
      described(tensors));
  for (size_t k = 0; k < tensors.size(); ++k) {
    if (tensors[k].numel() > 0) {
      const auto target = at::TensorOptions().dtype(expected[k].dtype).device(unit_.device());
      tensor_at(home_->slice(each.first_piece + k), tensors[k].sizes(), target).copy_(tensors[k]);
    }
  }
}

void ExtendedBucket::wait() {
  gathered_->wait();
  for (Extended& each : all_) {
    if (!each.sent.empty()) {
      make_whole(each, gathered_tensors(each));
      show_parts(each);
    }
  }
}

std::vector<at::Tensor> ExtendedBucket::gathered_tensors(const Extended& each) const {
  std::vector<at::Tensor> tensors;
  for (size_t k = 0; k < each.sent.size(); ++k) {
    const Sent& sent = each.sent[k];
    const auto on_device = at::TensorOptions().dtype(sent.dtype).device(unit_.device());
    tensors.push_back(
        tensor_at(gathered_->piece(each.first_piece + k), sent.sizes_of_all(gather_group->size()), on_device));
  }
  return tensors;
}

void ExtendedBucket::make_whole(Extended& each, const std::vector<at::Tensor>& gathered) {
  Param& param = each.param;
  GatherExtension::Whole whole;
  {
    OutermostScope scope;
    whole = each.extension->after_gather(gathered);
  }
  if (!whole.tensor.defined()) { // the module keeps its handle
    const auto& layout = param.layout();
    at::Tensor& values = whole.parts.at(0);
    FSDP_CHECK(
        whole.parts.size() == 1 && values.sizes() == c10::IntArrayRef(layout.sizes()),
        "[after all-gather] the extension of '{}' has to make one tensor of sizes {}, and made{}: cut off the padding "
        "that its before_gather has added",
        param.name(),
        c10::IntArrayRef(layout.sizes()),
        described(whole.parts));
    if (values.strides() != c10::IntArrayRef(layout.strides())) {
      values = at::empty_strided(layout.sizes(), layout.strides(), values.options()).copy_(values);
    }
    if (values.scalar_type() != param.gathered_dtype()) {
      param.become_handle(param.handle(), values.scalar_type());
    }
  }
  for (const auto& part : whole.parts) { // before they lose their memory
    each.parts.push_back(part.alias());
  }
  if (whole.tensor.defined() && !param.is_handle(whole.tensor)) {
    param.become_handle_around(whole.tensor, whole.parts);
  }
}

void ExtendedBucket::show_parts(const Extended& each) {
  for (size_t k = 0; k < each.parts.size(); ++k) {
    each.param.set_part(k, each.parts[k].numel() == 0 ? nullptr : each.parts[k].data_ptr());
  }
}

void ExtendedBucket::place(Param& param) {
  if (const Extended& each = all_[index_of(param)]; each.parts.size() == 1) {
    show_parts(each);
  }
}

void ExtendedBucket::release() {
  for (Extended& each : all_) {
    each.param.set_whole(nullptr);
    each.parts.clear();
  }
  gathered_.reset();
}

void ExtendedBucket::check_writable() const {
  fail(
      "[write to parameter] the whole value of '{}' is made by an all-gather extension, and cannot be written or "
      "summoned: write the shards, which parameters() gives",
      params()[0]->name());
}

void ExtendedBucket::begin_write() {
  // Other ranks never read the shards themselves.
}

int64_t ExtendedBucket::bytes() const {
  int64_t total = gathered_ ? gathered_->bytes() : 0;
  for (const Extended& each : all_) {
    for (const at::Tensor& part : each.parts) {
      const c10::Storage& memory = part.storage(); // or a view of what was gathered
      const bool pays = memory.device_type() == unit_.device().type() && memory.allocator() != nullptr;
      total += pays ? static_cast<int64_t>(memory.nbytes()) : 0;
    }
  }
  return total;
}

} // namespace fsdp::engine
