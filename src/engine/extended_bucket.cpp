#include "engine/extended_bucket.h"

#include <sstream>

#include <ATen/ops/empty_strided.h>

#include "base/check.h"
#include "base/tensor_at.h"
#include "engine/agreement.h"
#include "engine/internal_scope.h"
#include "engine/unit.h"

namespace fsdp::engine {

/// One of the tensors that a parameter is sent as, of each rank.
struct ExtendedBucket::Sent {
  std::vector<int64_t> sizes;
  c10::ScalarType dtype;

  explicit Sent(const at::Tensor& tensor) : sizes(tensor.sizes().vec()), dtype(tensor.scalar_type()) {}
  int64_t bytes() const {
    return c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  }
  std::vector<int64_t> sizes_of_all(int ranks) const {
    auto all = sizes.empty() ? std::vector<int64_t>{1} : sizes;
    all[0] *= ranks;
    return all;
  }
  bool operator==(const Sent& other) const {
    return sizes == other.sizes && dtype == other.dtype;
  }
};

/// The memory of one of the tensors that a whole parameter consists of.
struct ExtendedBucket::Part {
  void* memory;
  c10::Storage keeps;

  explicit Part(const at::Tensor& tensor)
      : memory(tensor.numel() == 0 ? nullptr : tensor.data_ptr()), keeps(tensor.storage()) {}
};

namespace {

std::string described(const std::vector<at::Tensor>& tensors) {
  std::ostringstream text;
  for (const auto& tensor : tensors) {
    text << " " << tensor.sizes() << " " << tensor.scalar_type();
  }
  return text.str();
}

} // namespace

ExtendedBucket::ExtendedBucket(BucketOptions options) : Bucket(std::move(options)) {}

ExtendedBucket::~ExtendedBucket() = default;

void ExtendedBucket::add(Param* param, std::shared_ptr<GatherExtension> extension) {
  Bucket::add(param, nullptr);
  param->leave_whole();
  extensions_.push_back(std::move(extension));
  sent_.emplace_back();
  parts_.emplace_back();
}

void ExtendedBucket::settle(const Label& label) {
  for (size_t i = 0; i < params().size(); ++i) {
    if (!params()[i]->on_meta()) {
      settle(i);
    }
  }
  check_alike(label);
  home_ = gather_group->make_home(pieces(), {options().device, false, false, /*rewritten=*/true}, label);
}

void ExtendedBucket::settle(size_t index) {
  Param& param = *params()[index];
  param.settle_shard_in_place();
  for (const auto& tensor : extensions_[index]->stored()) {
    param.watch(tensor);
  }
  sent_[index].clear();
  for (const auto& tensor : made_before_gather(index)) {
    sent_[index].emplace_back(tensor);
  }
}

std::vector<at::Tensor> ExtendedBucket::made_before_gather(size_t index) const {
  OutermostScope scope;
  return extensions_[index]->before_gather(params()[index]->shard());
}

// Ranks that send different sizes would wait for one another, or mix up what they got.
void ExtendedBucket::check_alike(const Label& label) const {
  std::ostringstream mine;
  for (size_t i = 0; i < sent_.size(); ++i) {
    mine << params()[i]->name() << ":";
    for (const Sent& sent : sent_[i]) {
      mine << " " << c10::IntArrayRef(sent.sizes) << " " << sent.dtype;
    }
    mine << "\n";
  }
  const auto other = find_other_text(*gather_group, mine.str(), label);
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
  for (const auto& sent_of_param : sent_) {
    for (const Sent& sent : sent_of_param) {
      pieces.push_back({sent.bytes() * gather_group->size(), sent.bytes(), c10::kByte, c10::kByte});
    }
  }
  return pieces;
}

void ExtendedBucket::gather(const Label& label) {
  home_->begin_write(label);
  size_t piece = 0;
  for (size_t i = 0; i < params().size(); ++i) {
    write(i, sent_[i].empty() ? std::vector<at::Tensor>() : made_before_gather(i), piece);
    piece += sent_[i].size();
  }
  gathered_ = home_->gather(label);
}

void ExtendedBucket::write(size_t index, const std::vector<at::Tensor>& tensors, size_t first_piece) {
  const auto& expected = sent_[index];
  const bool same = std::equal(
      tensors.begin(), tensors.end(), expected.begin(), expected.end(), [](const at::Tensor& tensor, const Sent& sent) {
        return Sent(tensor) == sent;
      });
  FSDP_CHECK(
      same,
      "[before all-gather] the extension of '{}' has to send tensors of the same sizes and dtypes every time; it sends "
      "now{}, which is something else than when the parameter was given its values",
      params()[index]->name(),
      described(tensors));
  for (size_t k = 0; k < tensors.size(); ++k) {
    if (tensors[k].numel() > 0) {
      const auto target = at::TensorOptions().dtype(expected[k].dtype).device(options().device);
      tensor_at(home_->slice(first_piece + k), tensors[k].sizes(), target).copy_(tensors[k]);
    }
  }
}

void ExtendedBucket::wait() {
  gathered_->wait();
  size_t piece = 0;
  for (size_t i = 0; i < params().size(); ++i) {
    if (!sent_[i].empty()) {
      make_whole(i, gathered_tensors(i, piece));
      show_parts(i);
    }
    piece += sent_[i].size();
  }
}

std::vector<at::Tensor> ExtendedBucket::gathered_tensors(size_t index, size_t first_piece) const {
  std::vector<at::Tensor> tensors;
  for (size_t k = 0; k < sent_[index].size(); ++k) {
    const Sent& sent = sent_[index][k];
    const auto on_device = at::TensorOptions().dtype(sent.dtype).device(options().device);
    tensors.push_back(tensor_at(gathered_->piece(first_piece + k), sent.sizes_of_all(gather_group->size()), on_device));
  }
  return tensors;
}

void ExtendedBucket::make_whole(size_t index, const std::vector<at::Tensor>& gathered) {
  Param& param = *params()[index];
  GatherExtension::Whole whole;
  {
    OutermostScope scope;
    whole = extensions_[index]->after_gather(gathered);
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
      param.become_handle(param.handle(), values.scalar_type(), options().device);
    }
  }
  for (const auto& part : whole.parts) { // before they lose their memory
    parts_[index].emplace_back(part);
  }
  if (whole.tensor.defined() && !param.is_handle(whole.tensor)) {
    param.become_handle_around(whole.tensor, whole.parts);
  }
}

void ExtendedBucket::show_parts(size_t index) {
  for (size_t k = 0; k < parts_[index].size(); ++k) {
    params()[index]->set_part(k, parts_[index][k].memory);
  }
}

void ExtendedBucket::place(Param& param) {
  const size_t index = index_of(param);
  if (parts_[index].size() == 1) {
    show_parts(index);
  }
}

void ExtendedBucket::release() {
  for (Param* param : params()) {
    param->set_whole(nullptr);
  }
  for (auto& parts : parts_) {
    parts.clear();
  }
  gathered_.reset();
}

void ExtendedBucket::check_writable() const {
  FSDP_CHECK(
      params().empty(),
      "[write to parameter] the whole value of '{}' is made by an all-gather extension, and cannot be written or "
      "summoned: write the shards, which parameters() gives",
      params()[0]->name());
}

void ExtendedBucket::begin_write(const Unit&) {
  // Other ranks never read the shards themselves.
}

int64_t ExtendedBucket::bytes() const {
  int64_t total = gathered_ ? gathered_->bytes() : 0;
  for (const auto& parts : parts_) {
    for (const Part& part : parts) {
      total += part.keeps.device_type() == options().device.type() && part.keeps.allocator() != nullptr
                   ? static_cast<int64_t>(part.keeps.nbytes()) // else a view of what was gathered
                   : 0;
    }
  }
  return total;
}

} // namespace fsdp::engine
