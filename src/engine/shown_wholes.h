#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

namespace fsdp::engine {

class Param;
class Unit;

/// The whole parameters that guards show: plain tensors, which do not say whose they are. On all threads, as ranks may
/// be some.
namespace shown_wholes {

void add(const at::Tensor& whole, Param& param);
void remove(const at::Tensor& whole);
/// Null if it is none.
std::shared_ptr<Unit> unit_of(const at::Tensor& tensor);
/// Users gave it other data: if it is one, its unit goes on with their values.
void was_given_data(const at::Tensor& tensor);

} // namespace shown_wholes

} // namespace fsdp::engine
