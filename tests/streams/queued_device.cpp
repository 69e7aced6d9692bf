#include "streams/queued_device.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/HPUHooksInterface.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace fsdp::testing::queued_device {
namespace {

constexpr auto kType = c10::kHPU;
constexpr int kStreams = 64; // so many that a test gets none twice

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kDevices> current_streams{};
std::atomic<bool> events_fail{false};

int number_of(const c10::Stream& stream) {
  return stream.device_index() * kStreams + static_cast<int>(stream.id());
}

c10::Stream stream_of(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), current_streams[index]);
}

void host_waits(const c10::Stream& stream) {
  detector().host_waits(stream.device_index(), record(stream));
}

// An event of c10 is a pointer of ours.
struct RecordedEvent {
  c10::DeviceIndex device;
  Clock clock;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, std::exchange(current_device, device.index())};
  }
  c10::Device getDevice() const override {
    return {kType, current_device};
  }
  void setDevice(c10::Device device) const override {
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return kDevices;
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device.has_index() ? device.index() : current_device);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::array<std::atomic<int>, kDevices> given{};
    const auto index = device.has_index() ? device.index() : current_device;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, index), 1 + given[index]++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto former = stream_of(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return former;
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    destroyEvent(*event, stream.device_index());
    *event = new RecordedEvent{stream.device_index(), queued_device::record(stream)};
  }
  void block(void* event, const c10::Stream& stream) const override {
    queued_device::block(stream, static_cast<RecordedEvent*>(event)->clock);
  }
  // A device may be as slow as it likes: nothing is done unless the host has waited for it.
  bool queryEvent(void* event) const override {
    const auto* recorded = static_cast<RecordedEvent*>(event);
    return detector().host_has_waited(recorded->device, recorded->clock);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<RecordedEvent*>(event);
  }
  bool queryStream(const c10::Stream& stream) const override {
    return detector().host_has_waited(stream.device_index(), queued_device::record(stream));
  }
  // Autograd does it where gradients go from one stream to another.
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    detector().recorded(data.get(), number_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits(stream);
  }
  void synchronizeEvent(void* event) const override {
    const auto* recorded = static_cast<RecordedEvent*>(event);
    detector().host_waits(recorded->device, recorded->clock);
  }
};

C10_REGISTER_GUARD_IMPL(HPU, Guard);

void free_memory(void* memory) {
  detector().freed(memory);
  std::free(memory);
}

void* allocate_lines(size_t bytes) {
  return std::aligned_alloc(64, (std::max<size_t>(bytes, 1) + 63) / 64 * 64);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = allocate_lines(bytes);
    detector().allocated(memory, std::max<size_t>(bytes, 1), number_of(stream_of(current_device)));
    return {memory, memory, &free_memory, c10::Device(kType, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_memory;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = allocate_lines(bytes);
    detector().allocated_on_host(memory, std::max<size_t>(bytes, 1));
    return {memory, memory, &free_memory, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_memory;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

struct Hooks final : at::HPUHooksInterface {
  explicit Hooks(at::HPUHooksArgs) {}
  void init() const override {}
  bool hasHPU() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  c10::Device getDeviceFromPtr(void* memory) const override {
    return {kType, static_cast<c10::DeviceIndex>(detector().stream_of(memory) / kStreams)};
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  bool isPinnedPtr(const void* memory) const override {
    return detector().is_on_host(memory);
  }
};

const bool allocator_is_set = [] {
  c10::SetAllocator(kType, &device_allocator);
  return true;
}();

c10::DispatchKeySet keys() {
  return c10::DispatchKeySet(c10::DispatchKey::HPU);
}

c10::DeviceIndex index_of(const std::optional<c10::Device>& device) {
  return device && device->has_index() ? device->index() : current_device;
}

/// Makes a device current for a scope.
class OnDevice {
 public:
  explicit OnDevice(c10::DeviceIndex index) : former_(std::exchange(current_device, index)) {}
  ~OnDevice() {
    current_device = former_;
  }

 private:
  c10::DeviceIndex former_;
};

at::Tensor empty(
    at::IntArrayRef sizes,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  const OnDevice scope(index_of(device));
  return at::detail::empty_generic(sizes, &device_allocator, keys(), dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes,
    at::IntArrayRef strides,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool>) {
  const OnDevice scope(index_of(device));
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, keys(), dtype.value_or(at::kFloat));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  const size_t bytes = self.numel() * self.element_size();
  if (bytes > self.storage().nbytes()) {
    const OnDevice scope(self.device().index());
    auto* storage = self.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(device_allocator.allocate(bytes));
    storage->set_nbytes(bytes);
  }
  return self;
}

bool is_here(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::Device device = is_here(to) ? to.device() : from.device();
  const c10::Stream stream = stream_of(device.index());
  const bool between_devices = is_here(to) && is_here(from);
  for (const at::Tensor* side : {&from, &to}) {
    if (is_here(*side) || side->is_pinned()) {
      use(*side, side == &to, stream, "copy");
    }
  }
  on_host(to).copy_(on_host(from));
  if (!between_devices && !non_blocking) {
    host_waits(stream);
  }
  return to;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  use(self, /*writes=*/false, stream_of(self.device().index()), "item");
  host_waits(stream_of(self.device().index()));
  return at::_local_scalar_dense(on_host(self));
}

/// One call of an operator that the CPU does in the device's place.
class HostCall {
 public:
  HostCall(const c10::OperatorHandle& op, torch::jit::Stack& stack) : op_(op), stack_(stack) {}

  void run() {
    const auto& arguments = op_.schema().arguments();
    const size_t first = stack_.size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = arguments[i].alias_info();
      writes_ = alias != nullptr && alias->isWrite();
      stack_[first + i] = to_host(stack_[first + i]);
    }
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(&stack_);
    }
    for (size_t i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); ++i) {
      stack_[i] = to_device(stack_[i]);
    }
  }

 private:
  c10::IValue to_host(const c10::IValue& value) {
    if (value.isTensor() && is_here(value.toTensor())) {
      return host_twin(value.toTensor());
    }
    if (value.isList()) {
      auto list = value.toList().copy();
      for (size_t i = 0; i < list.size(); ++i) {
        list.set(i, to_host(list.get(i)));
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == kType) {
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  at::Tensor host_twin(const at::Tensor& tensor) {
    device_ = tensor.device();
    if (tensor.numel() > 0) {
      use(tensor, writes_, stream_of(device_.index()), op_.schema().name());
    }
    twins_.emplace_back(tensor, on_host(tensor));
    return twins_.back().second;
  }

  c10::IValue to_device(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) {
      return device_twin(value.toTensor());
    }
    if (value.isTensorList()) {
      auto list = value.toTensorList().copy();
      for (size_t i = 0; i < list.size(); ++i) {
        list.set(i, device_twin(list.get(i)));
      }
      return list;
    }
    return value;
  }

  at::Tensor device_twin(const at::Tensor& host) {
    for (const auto& [original, twin] : twins_) {
      if (twin.is_same(host)) {
        return original;
      }
      TORCH_INTERNAL_ASSERT(
          !twin.is_alias_of(host), op_.schema().name(), " returned a view, for which this device has no operator");
    }
    const OnDevice scope(device_.index());
    auto result = at::empty_strided(host.sizes(), host.strides(), host.options().device(device_));
    if (host.numel() > 0) {
      use(result, /*writes=*/true, stream_of(device_.index()), op_.schema().name());
      on_host(result).copy_(host);
    }
    return result;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::vector<std::pair<at::Tensor, at::Tensor>> twins_; // ours, the CPU's
  c10::Device device_ = device(current_device);
  bool writes_ = false;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  HostCall(op, *stack).run();
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  use(self, /*writes=*/false, stream, "record_stream");
  detector().recorded(self.const_data_ptr(), number_of(stream));
}

TORCH_LIBRARY_IMPL(_, HPU, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, HPU, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  library.impl("view", TORCH_FN(at::native::view));
  library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
}

} // namespace
} // namespace fsdp::testing::queued_device

namespace at {
// LibTorch looks hooks up by the name that this makes of theirs.
using HPUHooks = fsdp::testing::queued_device::Hooks;
REGISTER_HPU_HOOKS(HPUHooks);
} // namespace at

namespace fsdp::testing::queued_device {

c10::Device device(int index) {
  return {kType, static_cast<c10::DeviceIndex>(index)};
}

RaceDetector& detector() {
  static auto* detector = new RaceDetector(kDevices, kStreams); // outlives tensors of static duration
  return *detector;
}

Clock record(const c10::Stream& stream) {
  TORCH_CHECK(!events_fail, "the device has failed");
  return detector().record(number_of(stream));
}

void fail_events(bool fail) {
  events_fail = fail;
}

void block(const c10::Stream& stream, const Clock& clock) {
  detector().block(number_of(stream), clock);
}

void use(const at::Tensor& tensor, bool writes, const c10::Stream& stream, const std::string& operation) {
  if (tensor.numel() > 0) {
    detector().used(tensor.const_data_ptr(), writes, number_of(stream), operation);
  }
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_here(tensor)) {
    return tensor;
  }
  return at::from_blob(
      const_cast<void*>(tensor.const_data_ptr()),
      tensor.sizes(),
      tensor.strides(),
      at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU));
}

} // namespace fsdp::testing::queued_device
