#pragma once

#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "streams/race_detector.h"

/// A device of host memory, with streams and events, so that the use of streams can be tested without a GPU. It goes
/// by the name of a device that LibTorch knows but has no operators for (HPU; PrivateUse1 would lack set_data). Work is
/// done at once, which is one of the orders that a real device may choose; the race detector finds where another order
/// is possible.
namespace fsdp::testing::queued_device {

inline constexpr int kDevices = 4;

c10::Device device(int index);
/// Of all devices.
RaceDetector& detector();

/// Tells the detector that work on `stream` uses the tensor's memory.
void use(const at::Tensor& tensor, bool writes, const c10::Stream& stream, const std::string& operation);
/// The tensor's memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor);

/// From now on, recording an event is an error, as everything is on a device that has failed.
void fail_events(bool fail);

Clock record(const c10::Stream& stream);
void block(const c10::Stream& stream, const Clock& clock);

} // namespace fsdp::testing::queued_device
