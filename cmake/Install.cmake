# The library's public face: include paths, install rules, the package that find_package(fsdp) reads.

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Installed, it has no run path to the LibTorch that it was built with: it takes that of the program.
set_target_properties(fsdp PROPERTIES LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
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

string(REGEX MATCH "^[0-9]+\\.[0-9]+" FSDP_TORCH_BUILT_WITH "${Torch_VERSION}")
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fsdp)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/fsdpConfig.cmake.in ${PROJECT_BINARY_DIR}/fsdpConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake COMPATIBILITY SameMinorVersion)

install(TARGETS fsdp EXPORT fsdpTargets)
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fsdp TYPE INCLUDE)
install(EXPORT fsdpTargets NAMESPACE fsdp:: DESTINATION ${package_dir})
install(FILES ${PROJECT_BINARY_DIR}/fsdpConfig.cmake ${PROJECT_BINARY_DIR}/fsdpConfigVersion.cmake
              ${PROJECT_SOURCE_DIR}/cmake/LibTorch.cmake DESTINATION ${package_dir})
if(PROJECT_IS_TOP_LEVEL AND NOT SKBUILD)
  install(PROGRAMS ${PROJECT_SOURCE_DIR}/scripts/launch TYPE BIN RENAME fsdp-launch)
endif()

# `cpack`: a Debian package and an archive.
set(CPACK_PACKAGE_NAME libfsdp)
set(CPACK_PACKAGE_VENDOR libfsdp)
set(CPACK_PACKAGE_CONTACT "the libfsdp maintainers")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Fully sharded data parallel training for LibTorch ${FSDP_TORCH_BUILT_WITH}")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_GENERATOR DEB TGZ)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6, libstdc++6, libgcc-s1")
set(CPACK_DEBIAN_PACKAGE_SUGGESTS python3) # for fsdp-launch
include(CPack)
