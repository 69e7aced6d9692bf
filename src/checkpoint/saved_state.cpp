#include <fsdp/saved_state.h>

#include <ATen/core/grad_mode.h>

#include "engine/internal_scope.h"
#include "engine/param.h"
#include "engine/tenant.h"
#include "engine/unit.h"
#include "engine/write_values.h"
#include "state/named_tensors.h"

namespace fsdp {

HeldTensor held_behind(const at::Tensor& tensor) {
  engine::Param* param = engine::param_of(tensor);
  if (param == nullptr) {
    return held(tensor);
  }
  param->unit().before_shard_read();
  return held(param->shard());
}

void copy_elements(const HeldTensor& from, const HeldTensor& to) {
  const c10::NoGradGuard no_grad;
  at::Tensor values;
  {
    const engine::InternalScope scope;
    values = layout::taken_from(state::as_piece(from), state::as_piece(to));
  }
  engine::write_values(to.local, values);
}

} // namespace fsdp
