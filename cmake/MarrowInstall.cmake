# SPDX-License-Identifier: Apache-2.0
# Install rules: libmarrow, headers, the command, find_package and pkg-config files. Each is relocatable.
# `cmake --build <dir> --target uninstall` removes what the install manifest lists.
include(CMakePackageConfigHelpers)

set(MARROW_CMAKE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/marrow")
if(TARGET marrow)
  # Two components: `library` (for programs that use Marrow) and `command`.
  set(CMAKE_INSTALL_DEFAULT_COMPONENT_NAME library)
  install(TARGETS marrow marrow_device EXPORT marrowTargets
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  add_custom_target(marrow_installed DEPENDS marrow)  # all that `cmake --install` copies
  if(TARGET marrow_cli)
    add_dependencies(marrow_installed marrow_cli)
    install(TARGETS marrow_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT command)
  endif()
  if(TARGET marrow_softnic_mlx5)
    # In a folder of their own, which no search path has: only who names it gets them.
    add_dependencies(marrow_installed marrow_softnic_ibverbs marrow_softnic_mlx5)
    install(TARGETS marrow_softnic_ibverbs marrow_softnic_mlx5
      LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}/marrow/softnic" NAMELINK_SKIP)
  endif()
  install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/" DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
    FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp" PATTERN "*.cuh")
  install(EXPORT marrowTargets NAMESPACE marrow:: DESTINATION ${MARROW_CMAKE_DIR})
  configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/marrowConfig.cmake.in"
    "${PROJECT_BINARY_DIR}/marrowConfig.cmake" INSTALL_DESTINATION ${MARROW_CMAKE_DIR})
  # Below 1.0 a minor release may change the API.
  write_basic_package_version_file("${PROJECT_BINARY_DIR}/marrowConfigVersion.cmake"
    COMPATIBILITY SameMinorVersion)
  install(FILES "${PROJECT_BINARY_DIR}/marrowConfig.cmake" "${PROJECT_BINARY_DIR}/marrowConfigVersion.cmake"
    DESTINATION ${MARROW_CMAKE_DIR})

  # pkg-config: the prefix follows the .pc file, so that the tree may be moved.
  file(RELATIVE_PATH MARROW_PC_PREFIX "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
  string(REGEX REPLACE "/$" "" MARROW_PC_PREFIX "${MARROW_PC_PREFIX}")
  configure_file("${PROJECT_SOURCE_DIR}/cmake/marrow.pc.in" "${PROJECT_BINARY_DIR}/marrow.pc" @ONLY)
  install(FILES "${PROJECT_BINARY_DIR}/marrow.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
  install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" "${PROJECT_SOURCE_DIR}/NOTICE"
    DESTINATION ${CMAKE_INSTALL_DOCDIR})

  # The build tree is a package too: export(TARGETS) lets find_package(marrow) take it directly.
  export(EXPORT marrowTargets NAMESPACE marrow:: FILE "${PROJECT_BINARY_DIR}/marrowTargets.cmake")

  if(MARROW_TOP_LEVEL AND NOT TARGET uninstall)
    add_custom_target(uninstall
      COMMAND ${CMAKE_COMMAND} -DMANIFEST=${PROJECT_BINARY_DIR}/install_manifest.txt
              -P "${PROJECT_SOURCE_DIR}/cmake/MarrowUninstall.cmake"
      VERBATIM)
  endif()
endif()
