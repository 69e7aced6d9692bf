# What this LibTorch and this machine offer: FSDP_HAS_<feature>. A missing feature is another source file, chosen by these.

include(CheckCXXSourceCompiles)

# fsdp_feature(name description source): does this compile against LibTorch?
function(fsdp_feature name description source)
  set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
  set(CMAKE_REQUIRED_QUIET ON)
  set(CMAKE_REQUIRED_FLAGS "${TORCH_CXX_FLAGS} -std=c++20")
  set(CMAKE_REQUIRED_INCLUDES ${TORCH_INCLUDE_DIRS} ${PROJECT_SOURCE_DIR}/src)
  check_cxx_source_compiles("${source}" FSDP_HAS_${name})
  if(FSDP_HAS_${name})
    message(STATUS "libfsdp: ${description}: yes")
  else()
    message(STATUS "libfsdp: ${description}: no")
  endif()
endfunction()

fsdp_feature(DATA_PTR_GUARD "an error of ours for raw access to hollow storage" "
#include <c10/core/StorageImpl.h>
void clear(c10::StorageImpl& storage) { storage.clear_data_ptr_access_error_msg_(); }")

fsdp_feature(TENSOR_METHODS "seeing what tensors' methods do to shards" "
#include <engine/forwarding_hooks.h>
fsdp::engine::ForwardingHooks forward(const at::impl::VariableHooksInterface& next) { return fsdp::engine::ForwardingHooks(next); }")

# The wheel exports ProcessGroupGloo but ships no gloo headers: those come from libgloo-dev.
fsdp_feature(GLOO "the Gloo backend" "
#define USE_C10D_GLOO
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
c10d::ProcessGroupGloo* group;")

fsdp_feature(NCCL "the NCCL backend" "
#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
c10d::ProcessGroupNCCL* group;")
