// SPDX-License-Identifier: Apache-2.0
// One rank over whatever MARROW_NETWORK names; says why when that does not work.
#include <cstdio>
#include <marrow/marrow.hpp>

int main() {
  try {
    marrow::Communicator comm(marrow::UniqueId::create(), 1, 0);
    comm.close();
    std::puts("connected");
    return 0;
  } catch (const marrow::Error& error) {
    std::puts(error.what());
    return 1;
  }
}
