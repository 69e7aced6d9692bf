# Finds LibTorch, for libfsdp itself and for those who find_package(fsdp), and names what a target links for it: FSDP_TORCH.

set(FSDP_TORCH_MINIMUM 2.11)
set(FSDP_TORCH torch torch_library c10)

# The folder of a Python's torch, found without importing it.
function(fsdp_torch_of_python python result)
  execute_process(
    COMMAND ${python} -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0], end='')"
    OUTPUT_VARIABLE root RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    message(FATAL_ERROR "FSDP_PYTHON=${python} has no torch: install it there, or name another Python")
  endif()
  set(${result} ${root} PARENT_SCOPE)
endfunction()

# The folder whose share/cmake/Torch/TorchConfig.cmake find_package would take from CMAKE_PREFIX_PATH or Torch_DIR.
function(fsdp_torch_of_prefixes result)
  set(env_prefixes $ENV{CMAKE_PREFIX_PATH})
  string(REPLACE ":" ";" env_prefixes "${env_prefixes}")
  foreach(place IN LISTS Torch_DIR CMAKE_PREFIX_PATH env_prefixes)
    foreach(up_to_root "../../.." "../.." ".")
      get_filename_component(root ${place}/${up_to_root} ABSOLUTE)
      if(EXISTS ${root}/share/cmake/Torch/TorchConfig.cmake AND EXISTS ${root}/lib/libc10.so)
        set(${result} ${root} PARENT_SCOPE)
        return()
      endif()
    endforeach()
  endforeach()
endfunction()

# LibTorch's own package wants a whole CUDA toolkit where LibTorch was made for CUDA. libfsdp compiles no device code and needs
# CUDA's headers alone, which lie beside the wheel or in a toolkit; so it imports such a LibTorch itself.
function(fsdp_import_cuda_torch root)
  file(STRINGS ${root}/version.py version REGEX "^__version__")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" version "${version}")
  if(version VERSION_LESS FSDP_TORCH_MINIMUM)
    message(FATAL_ERROR "libfsdp needs LibTorch ${FSDP_TORCH_MINIMUM} or later, but ${root} has ${version}")
  endif()
  set(Torch_VERSION ${version} PARENT_SCOPE)

  file(GLOB cuda_includes ${root}/../nvidia/*/include)
  find_package(CUDAToolkit QUIET)
  list(APPEND cuda_includes ${CUDAToolkit_INCLUDE_DIRS})
  set(includes ${root}/include ${root}/include/torch/csrc/api/include ${cuda_includes})
  set(TORCH_INCLUDE_DIRS ${includes} PARENT_SCOPE)
  add_library(torch INTERFACE IMPORTED GLOBAL)
  target_include_directories(torch SYSTEM INTERFACE ${includes})
  target_compile_definitions(torch INTERFACE USE_DISTRIBUTED USE_C10D_GLOO USE_C10D_NCCL)
  # libtorch.so is what brings the device's libraries in, though nothing of it may be used by name.
  target_link_libraries(torch INTERFACE -Wl,--no-as-needed ${root}/lib/libtorch.so -Wl,--as-needed
                                        ${root}/lib/libtorch_cuda.so ${root}/lib/libtorch_cpu.so)
  target_link_options(torch INTERFACE -Wl,--allow-shlib-undefined)
  add_library(torch_library INTERFACE IMPORTED GLOBAL)
  add_library(c10 SHARED IMPORTED GLOBAL)
  set_target_properties(c10 PROPERTIES IMPORTED_LOCATION ${root}/lib/libc10.so)
endfunction()

if(NOT TARGET torch)
  if(FSDP_PYTHON)
    fsdp_torch_of_python(${FSDP_PYTHON} fsdp_torch_root)
    list(PREPEND CMAKE_PREFIX_PATH ${fsdp_torch_root}/share/cmake)
  else()
    fsdp_torch_of_prefixes(fsdp_torch_root)
  endif()
  if(EXISTS "${fsdp_torch_root}/lib/libtorch_cuda.so")
    fsdp_import_cuda_torch(${fsdp_torch_root})
    set(FSDP_TORCH_HAS_CUDA ON)
  else()
    find_package(Torch ${FSDP_TORCH_MINIMUM} REQUIRED)
  endif()
  message(STATUS "libfsdp: LibTorch ${Torch_VERSION}")
endif()
