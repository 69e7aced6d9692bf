# The library's public face: include paths, install rules, the package that find_package(fsdp) reads.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set_target_properties(fsdp PROPERTIES LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
                                      INSTALL_RPATH $<TARGET_FILE_DIR:c10>)
target_compile_features(fsdp PUBLIC cxx_std_20)
target_link_libraries(fsdp PUBLIC ${FSDP_TORCH})
if(FSDP_SANITIZE)
  target_link_options(fsdp PRIVATE -fsanitize=${FSDP_SANITIZE})
else()
  # The sanitizers' run time is in the program, not in the library.
  target_link_options(fsdp PRIVATE -Wl,--no-undefined)
endif()
target_include_directories(fsdp PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                       $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
add_library(fsdp::fsdp ALIAS fsdp)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/fsdpConfig.cmake.in ${PROJECT_BINARY_DIR}/fsdpConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake COMPATIBILITY SameMinorVersion)

install(TARGETS fsdp EXPORT fsdpTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fsdp TYPE INCLUDE)
install(EXPORT fsdpTargets NAMESPACE fsdp:: DESTINATION ${package_dir})
install(FILES ${PROJECT_BINARY_DIR}/fsdpConfig.cmake ${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/LibTorch.cmake DESTINATION ${package_dir})
