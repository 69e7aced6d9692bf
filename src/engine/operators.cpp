#include "engine/operators.h"

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fsdp::engine {

namespace {

using Names = std::unordered_set<std::string_view>;

// Their schemas promise a view, but they may copy.
bool may_copy(std::string_view name) {
  static const Names names = {
      "aten::contiguous",
      "aten::reshape",
      "aten::reshape_as",
      "aten::to",
      "aten::flatten",
      "aten::ravel",
      "aten::cpu",
      "aten::cuda",
      "aten::pin_memory",
      "aten::resolve_conj",
      "aten::resolve_neg",
      "aten::type_as",
      "aten::_autocast_to_full_precision",
      "aten::_autocast_to_reduced_precision"};
  return names.count(name) > 0;
}

// They ask for metadata, or make new tensors from it.
bool asks_metadata(std::string_view name) {
  static const Names names = {
      "aten::size",
      "aten::stride",
      "aten::numel",
      "aten::dim",
      "aten::sym_size",
      "aten::sym_stride",
      "aten::sym_numel",
      "aten::sym_storage_offset",
      "aten::storage_offset",
      "aten::is_same_size",
      "aten::is_floating_point",
      "aten::is_complex",
      "aten::is_signed",
      "aten::is_leaf",
      "aten::is_pinned",
      "aten::is_contiguous",
      "aten::output_nr",
      "aten::_version",
      "aten::requires_grad_",
      "aten::retain_grad",
      "aten::retains_grad",
      "aten::set_data",
      "aten::result_type",
      "aten::can_cast",
      "aten::empty_like",
      "aten::zeros_like",
      "aten::ones_like",
      "aten::full_like",
      "aten::rand_like",
      "aten::randn_like",
      "aten::randint_like",
      "aten::new_empty",
      "aten::new_zeros",
      "aten::new_ones",
      "aten::new_full",
      "aten::new_empty_strided",
      "aten::_has_compatible_shallow_copy_type",
      "aten::_debug_has_internal_overlap",
      "aten::detach_",
      "aten::is_inference",
      "aten::is_conj",
      "aten::is_neg",
      "aten::_nested_tensor_size"};
  return names.count(name) > 0;
}

// Its schema promises a write, but it only says until when the memory is needed.
bool writes_nothing(std::string_view name) {
  return name == "aten::record_stream";
}

bool needs_equal_dtypes(std::string_view name) {
  static const Names names = {
      "aten::linear",
      "aten::matmul",
      "aten::mm",
      "aten::bmm",
      "aten::mv",
      "aten::dot",
      "aten::vdot",
      "aten::addmm",
      "aten::addmv",
      "aten::_addmm_activation",
      "aten::addbmm",
      "aten::baddbmm",
      "aten::einsum",
      "aten::bilinear",
      "aten::_trilinear",
      "aten::tensordot",
      "aten::inner",
      "aten::linalg_multi_dot",
      "aten::scaled_dot_product_attention",
      "aten::conv1d",
      "aten::conv2d",
      "aten::conv3d",
      "aten::convolution",
      "aten::_convolution", // as torch.jit.trace writes every convolution
      "aten::conv_transpose1d",
      "aten::conv_transpose2d",
      "aten::conv_transpose3d",
      "aten::layer_norm",
      "aten::native_layer_norm",
      "aten::group_norm",
      "aten::native_group_norm",
      "aten::batch_norm",
      "aten::native_batch_norm",
      "aten::instance_norm",
      "aten::lstm",
      "aten::gru",
      "aten::rnn_tanh",
      "aten::rnn_relu",
      "aten::lstm_cell",
      "aten::gru_cell",
      "aten::rnn_tanh_cell",
      "aten::rnn_relu_cell",
      "aten::prelu",
      "aten::embedding_bag",
      "aten::_native_multi_head_attention",
      "aten::_transformer_encoder_layer_fwd",
      "aten::multi_head_attention_forward"};
  return names.count(name) > 0;
}

// Their lists of weights may hold shards: a recurrent module of LibTorch fills its own with what is registered, when it
// is moved or cast.
bool takes_list_of_weights(const c10::Argument& argument, std::string_view name) {
  static const Names names = {"aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu"};
  return (argument.name() == "params" && names.count(name) > 0) ||
         (argument.name() == "weight_arr" && name == "aten::_cudnn_rnn_flatten_weight");
}

// c10d's schemas do not say what is written. It is the first argument, where results are; later, if the collective is
// asynchronous.
bool is_collective(std::string_view name) {
  return name.starts_with("c10d::");
}

bool is_collective_that_only_reads(std::string_view name) {
  static const Names names = {"c10d::send", "c10d::barrier", "c10d::monitored_barrier_"};
  return names.count(name) > 0;
}

OperatorTraits read_schema(const c10::FunctionSchema& schema) {
  OperatorTraits traits;
  const std::string_view name = schema.name();
  traits.dtypes_must_agree = needs_equal_dtypes(name);
  if (asks_metadata(name)) {
    traits.reads_nothing = true;
    return traits;
  }
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size() && i < 64; ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias != nullptr && alias->isWrite() && !writes_nothing(name)) {
      traits.writes |= uint64_t{1} << i;
    }
    if (takes_list_of_weights(arguments[i], name)) {
      traits.weights = static_cast<int>(i);
    }
  }
  traits.writes_later = name == "fsdp::note_write_";
  if (is_collective(name)) {
    traits.writes = is_collective_that_only_reads(name) ? 0 : 1;
    traits.writes_later = true;
  }
  const auto& results = schema.returns();
  bool only_views = !results.empty() && traits.writes == 0 && !traits.writes_later && !may_copy(name);
  for (const auto& result : results) {
    only_views = only_views && result.alias_info() != nullptr;
  }
  traits.reads_nothing = only_views;
  return traits;
}

/// Counts operators that go: another one may get the address of its schema.
std::atomic<int64_t> deregistrations = 0;

struct CountDeregistrations final : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle&) override {}
  void onOperatorDeregistered(const c10::OperatorHandle&) override {
    ++deregistrations;
  }
};
[[maybe_unused]] const auto& listening = *new c10::RegistrationHandleRAII(
    c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<CountDeregistrations>()));

const OperatorTraits& known_traits(const c10::FunctionSchema& schema, int64_t deregistered) {
  static thread_local std::unordered_map<const c10::FunctionSchema*, const OperatorTraits*> all;
  static thread_local std::deque<OperatorTraits> read; // kept: a call that runs may need them
  static thread_local int64_t known_until = 0;
  if (std::exchange(known_until, deregistered) != deregistered) {
    all.clear(); // another schema may have a former one's place
  }
  const OperatorTraits*& traits = all[&schema];
  if (traits == nullptr) {
    traits = &read.emplace_back(read_schema(schema));
  }
  return *traits;
}

} // namespace

// Schemas keep their address as long as they are registered. The small table in front spares the hash map its modulo
// and its misses.
const OperatorTraits& traits_of(const c10::OperatorHandle& op) {
  struct Recent {
    struct Entry {
      const c10::FunctionSchema* schema = nullptr;
      const OperatorTraits* traits = nullptr;
    };
    std::array<Entry, 256> entries;
    int64_t known_until = 0; // deregistrations
  };
  static thread_local Recent recent; // one variable of threads: to find one costs as much as to look into it
  const int64_t now = deregistrations.load(std::memory_order_relaxed);
  if (now != recent.known_until) {
    recent = {.entries = {}, .known_until = now};
  }
  const c10::FunctionSchema* schema = &op.schema();
  auto& entry = recent.entries[(reinterpret_cast<uintptr_t>(schema) >> 5) % recent.entries.size()];
  if (entry.schema != schema) {
    entry = {schema, &known_traits(*schema, now)};
  }
  return *entry.traits;
}

} // namespace fsdp::engine
