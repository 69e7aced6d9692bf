#include <fsdp/gather_extension.h>

namespace fsdp {

GatherExtension::~GatherExtension() = default;

std::vector<at::Tensor> GatherExtension::stored() {
  return {};
}

} // namespace fsdp
