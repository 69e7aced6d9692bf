#pragma once

#include "fsdp1/fsdp_instance.h"

/// What is due when the outermost instance of a model is called.
namespace fsdp::root_call {

/// The first time: instances have to agree, buffers get their dtypes. Each time: the dtype to compute in follows
/// whether the model trains. Collective where that changes.
void prepare(FSDPInstance::Impl& root);

} // namespace fsdp::root_call
