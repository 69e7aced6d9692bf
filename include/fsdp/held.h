#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/export.h>
#include <fsdp/extent.h>
#include <fsdp/mesh.h>
#include <fsdp/module_ref.h>

namespace fsdp {

/// What this rank has of a tensor: of a parameter, or of what is cut as one, an optimizer's state. The same for every
/// cut, along a dimension or as a part of a flat parameter. A value; shares its memory with what it describes.
struct HeldTensor {
  std::string name{}; ///< as in the unsharded model
  std::vector<int64_t> sizes{}; ///< of the whole
  std::vector<int64_t> strides{}; ///< of the whole, whose memory has no gaps
  Extent extent{}; ///< the elements of the whole that are here
  at::Tensor local{}; ///< these elements; where the cut leaves rows they have its shape, else one dimension
  std::optional<Mesh> mesh{}; ///< unset: the whole is here, and on all other ranks
  bool first_replica = true; ///< of the ranks that have these elements, this one writes them to a file

  c10::ScalarType dtype() const {
    return local.scalar_type();
  }
};

/// Of one tensor: a shard, or a tensor that is not sharded.
FSDP_API HeldTensor held(const at::Tensor& tensor);
/// Another tensor that is cut as `held` is, so has the sizes of its local one: an optimizer's state of a parameter.
FSDP_API HeldTensor like(const HeldTensor& held, const at::Tensor& tensor);
/// Of all parameters of a module, a tied one under each of its names. Nothing is communicated, unless members were
/// written to since the last step, or the module given another dtype.
FSDP_API std::vector<HeldTensor> held(ModuleRef module);

} // namespace fsdp
