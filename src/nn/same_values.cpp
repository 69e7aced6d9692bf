#include "nn/same_values.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include <ATen/ops/linspace.h>
#include <ATen/ops/take.h>
#include <c10/util/hash.h>

#include "base/log.h"
#include "engine/internal_scope.h"
#include "engine/recorded_storage.h"
#include "engine/tenant.h"
#include "engine/write_values.h"

namespace fsdp::nn {

namespace {

constexpr int64_t kLookedAt = 256; // of a parameter's elements: seeds that differ show in each
constexpr size_t kLetters = 8; // of a digest

std::optional<c10::ScalarType> integer_of(size_t bytes) {
  switch (bytes) {
    case 1:
      return c10::kByte;
    case 2:
      return c10::kShort;
    case 4:
      return c10::kInt;
    case 8:
      return c10::kLong;
    default:
      return std::nullopt;
  }
}

bool has_plain_memory(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_meta() && tensor.numel() > 0 && tensor.layout() == c10::kStrided &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

std::string shortened(const std::string& bytes) {
  return c10::sha1(bytes).str().substr(0, kLetters);
}

std::string digest_of(const at::Tensor& tensor) {
  if (engine::recorded_storage_of(tensor) != nullptr) {
    return shortened(engine::fingerprint(tensor));
  }
  const auto integer = integer_of(tensor.element_size());
  if (!has_plain_memory(tensor) || !integer || tensor.is_conj() || tensor.is_neg()) {
    return std::string(kLetters, '-');
  }
  const auto places = at::linspace(
      0,
      static_cast<double>(tensor.numel() - 1),
      std::min(tensor.numel(), kLookedAt),
      at::TensorOptions().dtype(c10::kDouble));
  const at::Tensor some = at::take(tensor.detach().view(*integer), places.to(c10::kLong).to(tensor.device())).cpu();
  return shortened(std::string(static_cast<const char*>(some.const_data_ptr()), some.nbytes()));
}

// What a module below has sent among its own ranks stays: they may be others. By its memory, as PyTorch may swap
// tensors to which nobody has weak references.
std::mutex sent_mutex;
std::unordered_map<const c10::StorageImpl*, engine::WeakStorage> sent;

bool is_sent(const at::Tensor& buffer) {
  const std::lock_guard lock(sent_mutex);
  return has_plain_memory(buffer) && sent.count(buffer.storage().unsafeGetStorageImpl()) > 0;
}

} // namespace

std::string digests_of_values(const std::vector<engine::ParamSpec>& params) {
  const engine::InternalScope scope;
  std::string digests;
  for (const auto& param : params) {
    digests += digest_of(param.tensor);
  }
  return digests;
}

void warn_of_other_values(
    const Group& group,
    const std::vector<engine::ParamSpec>& params,
    const std::string& mine,
    const engine::OtherText& other) {
  static std::atomic<bool> warned = false;
  if (group.rank() != 0 || warned.exchange(true)) {
    return;
  }
  const auto [letter, theirs] = std::mismatch(mine.begin(), mine.end(), other.text.begin(), other.text.end());
  log::warn(
      "[fully_shard] rank 0 and rank {} give '{}' different values, and perhaps others: each rank keeps its part of "
      "its own, so that the whole is neither's. Seed the generators alike, or have one rank's sent to all "
      "(sync_module_states, which Python's fully_shard has not); if a checkpoint is loaded next, nothing has to be "
      "done",
      other.rank,
      params[(letter - mine.begin()) / kLetters].name);
}

// Outermost last: then the first rank of each group has what is to be sent.
void broadcast_from_first(const at::Tensor& tensor, const Mesh& mesh, const Label& label) {
  if (!has_plain_memory(tensor) || mesh.numel() == 1) {
    return;
  }
  const at::Tensor values = tensor.detach().to(mesh.device()).contiguous();
  const at::Tensor bytes = values.flatten().view(c10::kByte);
  for (int dim = mesh.ndim() - 1; dim >= 0; --dim) {
    mesh.group(dim)->broadcast(bytes, /*root=*/0, label);
  }
  if (!values.is_alias_of(tensor)) {
    engine::write_values(tensor, values);
  }
}

void broadcast_values(const engine::UnitSpec& spec, const std::vector<at::Tensor>& buffers) {
  const engine::InternalScope scope;
  const Label label{"sync_module_states", spec.name};
  for (const auto& param : spec.params) {
    broadcast_from_first(param.tensor, param.placement.mesh.value_or(spec.mesh), label);
  }
  for (const auto& buffer : buffers) {
    if (!is_sent(buffer)) {
      broadcast_from_first(buffer, spec.mesh, label);
    }
  }
}

void note_sent(const std::vector<at::Tensor>& buffers) {
  const std::lock_guard lock(sent_mutex);
  std::erase_if(sent, [](const auto& item) { return item.second.expired(); });
  for (const auto& buffer : buffers) {
    if (has_plain_memory(buffer)) {
      sent.try_emplace(buffer.storage().unsafeGetStorageImpl(), buffer.storage().getWeakStorageImpl());
    }
  }
}

} // namespace fsdp::nn
