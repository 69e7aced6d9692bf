# Compile options shared by everything, and the ways in which a folder adds itself.

# In dependency order: a layer may use those before it. scripts/check_layers.py has the exact rule.
set(FSDP_LAYERS base layout comm engine nn optim state fsdp1 checkpoint)

add_library(fsdp_options INTERFACE)
target_link_libraries(fsdp_options INTERFACE ${FSDP_TORCH})
target_include_directories(fsdp_options INTERFACE ${PROJECT_SOURCE_DIR}/include)
target_compile_options(fsdp_options INTERFACE -Wall -Wextra $<$<BOOL:${FSDP_WERROR}>:-Werror>)
if(FSDP_HAS_DATA_PTR_GUARD)
  target_compile_definitions(fsdp_options INTERFACE FSDP_HAS_DATA_PTR_GUARD)
endif()
if(FSDP_SANITIZE)
  # vptr would need the type information of LibTorch's hidden classes. Of fences, which are in LibTorch's headers, gcc says
  # that the thread sanitizer does not see them.
  target_compile_options(
    fsdp_options INTERFACE -fsanitize=${FSDP_SANITIZE} -fno-sanitize=vptr -fno-sanitize-recover=undefined
                           -fno-omit-frame-pointer -g -Wno-tsan)
  target_link_options(fsdp_options INTERFACE -fsanitize=${FSDP_SANITIZE})
endif()

# fsdp_optimize_less(target): for programs and tests, whose time goes into the library's code and LibTorch's; a third less to
# compile.
function(fsdp_optimize_less target)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
endfunction()

# fsdp_precompile(target group headers...): headers that are parsed once for all targets of a group. gcc takes a precompiled
# header only where the flags agree, so its carrier is compiled as the targets are.
function(fsdp_precompile target group)
  if(NOT FSDP_PRECOMPILE)
    return()
  endif()
  set(carrier fsdp_pch_${group})
  if(NOT TARGET ${carrier})
    set(source ${PROJECT_BINARY_DIR}/pch/${group}.cpp)
    file(CONFIGURE OUTPUT ${source} CONTENT "// Carries the precompiled header of the group @group@.\n" @ONLY)
    add_library(${carrier} OBJECT ${source})
    target_link_libraries(${carrier} PRIVATE fsdp_options)
    if(group MATCHES test)
      target_link_libraries(${carrier} PRIVATE GTest::gtest)
    endif()
    target_compile_options(${carrier} PRIVATE -fpch-preprocess)
    target_precompile_headers(${carrier} PRIVATE ${ARGN})
    get_target_property(type ${target} TYPE)
    if(type STREQUAL EXECUTABLE)
      set_target_properties(${carrier} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
      target_compile_options(${carrier} PRIVATE -fPIE)
      fsdp_optimize_less(${carrier})
    endif()
  endif()
  target_compile_options(${target} PRIVATE -fpch-preprocess)
  target_precompile_headers(${target} REUSE_FROM ${carrier})
endfunction()

# fsdp_layer(name sources...): one folder of the library, or a part of it.
function(fsdp_layer name)
  add_library(fsdp_${name} OBJECT ${ARGN})
  target_link_libraries(fsdp_${name} PRIVATE fsdp_options)
  target_include_directories(fsdp_${name} PRIVATE ${PROJECT_SOURCE_DIR}/src)
  # As much as most files of the layer need, and no more: whatever templates a precompiled header mentions are instantiated again
  # in every file, which for torch/nn/module.h takes three seconds, for torch/torch.h seven.
  if(name MATCHES "nn|optim|state|fsdp1|checkpoint")
    fsdp_precompile(fsdp_${name} module <torch/nn/module.h>)
  elseif(name STREQUAL c10d)
    fsdp_precompile(fsdp_${name} c10d <functional> <memory> <string> <vector> <torch/csrc/distributed/c10d/ProcessGroup.hpp>)
  elseif(NOT name STREQUAL base)
    fsdp_precompile(fsdp_${name} library <functional> <memory> <string> <unordered_map> <vector> <ATen/core/Tensor.h>)
  endif()
  target_sources(fsdp PRIVATE $<TARGET_OBJECTS:fsdp_${name}>)
endfunction()

# fsdp_program(name sources...): a program that uses the library as its users do.
function(fsdp_program name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE fsdp fsdp_options)
  fsdp_optimize_less(${name})
  fsdp_precompile(${name} program <torch/torch.h>)
endfunction()

# fsdp_add_test(name PARTS parts TIMEOUT seconds COMMAND command... ENVIRONMENT variables...): a test of CTest, or several, that
# run side by side, each one of the parts. $PART and $PARTS in `variables` say which. What takes longest begins first.
function(fsdp_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "PARTS;TIMEOUT" "COMMAND;ENVIRONMENT")
  math(EXPR last "${test_PARTS} - 1")
  foreach(part RANGE ${last})
    set(full_name ${name})
    if(test_PARTS GREATER 1)
      string(APPEND full_name _${part})
    endif()
    string(REPLACE "$PARTS" ${test_PARTS} environment "${test_ENVIRONMENT}")
    string(REPLACE "$PART" ${part} environment "${environment}")
    string(REPLACE "$NAME" ${full_name} environment "${environment}")
    string(REPLACE "$NAME" ${full_name} command "${test_COMMAND}")
    add_test(NAME ${full_name} COMMAND ${command})
    set_tests_properties(${full_name} PROPERTIES TIMEOUT ${test_TIMEOUT} COST ${test_TIMEOUT} ENVIRONMENT "${environment}")
  endforeach()
endfunction()

# fsdp_test(name [PARTS parts] [TIMEOUT seconds] sources...): one test binary of the folder it is called in. It is linked with
# the objects of that layer and of those before it, not with libfsdp.so, so that it can test what is hidden there.
function(fsdp_test name)
  cmake_parse_arguments(PARSE_ARGV 1 test "" "PARTS;TIMEOUT" "")
  add_executable(${name} ${test_UNPARSED_ARGUMENTS})
  get_filename_component(folder ${CMAKE_CURRENT_SOURCE_DIR} NAME)
  foreach(layer IN LISTS FSDP_LAYERS)
    target_link_libraries(${name} PRIVATE fsdp_${layer} $<$<STREQUAL:${layer},comm>:fsdp_c10d>)
    if(layer STREQUAL folder)
      break()
    endif()
  endforeach()
  target_link_libraries(${name} PRIVATE fsdp_options fsdp_test_main)
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  if(folder MATCHES "engine|nn|optim|state|fsdp1|checkpoint|streams")
    fsdp_precompile(${name} program <torch/torch.h>)
  elseif(folder STREQUAL comm)
    fsdp_precompile(${name} comm_test <functional> <memory> <string> <vector> <gtest/gtest.h> <ATen/ATen.h>)
  else()
    fsdp_precompile(${name} small_test <functional> <memory> <string> <vector> <gtest/gtest.h> <ATen/core/Tensor.h>)
  endif()
  fsdp_optimize_less(${name})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/tests)
  if(NOT test_PARTS)
    set(test_PARTS 1)
  endif()
  if(NOT test_TIMEOUT)
    set(test_TIMEOUT 600)
  endif()
  if(FSDP_SANITIZE AND test_TIMEOUT LESS 1200)
    set(test_TIMEOUT 1200)
  endif()
  set(shard "")
  if(test_PARTS GREATER 1)
    set(shard GTEST_TOTAL_SHARDS=$PARTS GTEST_SHARD_INDEX=$PART)
  endif()
  fsdp_add_test(${name} PARTS ${test_PARTS} TIMEOUT ${test_TIMEOUT} COMMAND ${name} ENVIRONMENT
                OMP_NUM_THREADS=1 "GTEST_OUTPUT=xml:${PROJECT_BINARY_DIR}/results/$NAME.xml" ${shard})
endfunction()
