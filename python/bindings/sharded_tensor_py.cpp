#include <fsdp/sharded_tensor.h>

#include "bindings.h"

namespace fsdp::python {

void bind_sharded_tensor(py::module_& m) {
  py::class_<ShardedTensor>(m, "ShardedTensor")
      .def_readonly("local", &ShardedTensor::local)
      .def_readonly("name", &ShardedTensor::name)
      .def_readonly("sizes", &ShardedTensor::sizes)
      .def_readonly("strides", &ShardedTensor::strides)
      .def_readonly("mesh", &ShardedTensor::mesh)
      .def_property_readonly("shard_dims", [](const ShardedTensor& tensor) {
        std::vector<std::optional<int64_t>> dims; // unset: replicated
        for (const auto& placement : tensor.placements) {
          dims.push_back(placement.shard_dim);
        }
        return dims;
      });
  m.def("sharded", &sharded, py::arg("shard"));
}

} // namespace fsdp::python
