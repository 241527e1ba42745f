// SPDX-License-Identifier: Apache-2.0
#include "networks/libfabric/table.hpp"

#include <dlfcn.h>
#include <rdma/fi_errno.h>

#include <algorithm>
#include <cstdlib>

#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::networks::libfabric {

const Table& table() {
  static const Table loaded = [] {
    void* library = ::dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      const char* why = ::dlerror();
      throw Error(Code::unsupported, base::cat("no libfabric here: ", why ? why : "no reason"),
                  "install libfabric (libfabric1), or use another network");
    }
    // Debian's ofi_rxm sets 64 MiB an endpoint aside for messages of 16 KiB; ours have 72 bytes, and puts use none of
    // it. There is no other way to say so, and it is read when the first device is looked for. A user's own value
    // stays.
    ::setenv("FI_OFI_RXM_BUFFER_SIZE", "256", 0);
    // Removing the address of a rank that is gone closes its connection.
    ::setenv("FI_AV_REMOVE_CLEANUP", "1", 0);
    Table t;
    const auto need = [&](const char* symbol, auto& target) {
      target =
          reinterpret_cast<std::remove_reference_t<decltype(target)>>(::dlsym(library, symbol));
      if (!target) {
        throw Error(Code::unsupported, base::cat("libfabric.so.1 lacks ", symbol),
                    "install libfabric 1.9 or newer");
      }
    };
    need("fi_version", t.version);
    need("fi_getinfo", t.getinfo);
    need("fi_freeinfo", t.freeinfo);
    need("fi_dupinfo", t.dupinfo);
    need("fi_fabric", t.fabric);
    need("fi_strerror", t.strerror);
    return t;
  }();
  return loaded;
}

std::uint32_t wanted_version() {
  return std::min<std::uint32_t>(FI_VERSION(FI_MAJOR_VERSION, FI_MINOR_VERSION), table().version());
}

std::string text(std::int64_t result) {
  return table().strerror(static_cast<int>(result < 0 ? -result : result));
}

std::int64_t check(std::int64_t result, const std::string& what) {
  if (result >= 0) return result;
  const Code code = result == -FI_ENOMEM ? Code::out_of_memory
                    : result == -FI_ENODATA || result == -FI_ENOSYS || result == -FI_EOPNOTSUPP
                        ? Code::unsupported
                        : Code::network;
  throw Error(code, base::cat(what, ": ", text(result)),
              code == Code::out_of_memory ? "raise the limit of locked memory (ulimit -l)" : "");
}

}  // namespace marrow::networks::libfabric
