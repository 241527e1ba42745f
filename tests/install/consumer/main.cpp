// SPDX-License-Identifier: Apache-2.0
// Uses one function that lives in libmarrow and one header: proves include path, link and run path.
#include <cstdio>
#include <marrow/error.hpp>
#if __has_include(<marrow/marrow.hpp>)
#include <marrow/marrow.hpp>
#endif

int main() {
#if __has_include(<marrow/marrow.hpp>)
  const auto id = marrow::UniqueId::create();
  std::printf("unique id of %zu bytes\n", sizeof(id));
#endif
  std::puts(marrow::name(marrow::Code::ok));
  return 0;
}
