# SPDX-License-Identifier: Apache-2.0
# Writes OUT, a source with the commit of SOURCE; leaves it alone when nothing changed. Outside git the environment
# variable MARROW_COMMIT says it.
set(commit "unknown")
if(NOT "$ENV{MARROW_COMMIT}" STREQUAL "")
  set(commit "$ENV{MARROW_COMMIT}")
endif()
if(GIT)
  execute_process(COMMAND ${GIT} -c safe.directory=${SOURCE} -C ${SOURCE} describe --always --dirty --abbrev=12 --exclude=*
    OUTPUT_VARIABLE found ERROR_QUIET RESULT_VARIABLE status OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(status EQUAL 0)
    set(commit "${found}")
  endif()
endif()
file(CONFIGURE OUTPUT "${OUT}" @ONLY CONTENT [=[
// SPDX-License-Identifier: Apache-2.0
#include "cli/result.hpp"
namespace marrow::cli {
std::string commit() { return "@commit@"; }
}  // namespace marrow::cli
]=])
