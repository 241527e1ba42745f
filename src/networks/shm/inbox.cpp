// SPDX-License-Identifier: Apache-2.0
#include "networks/shm/inbox.hpp"

#include "base/memfd.hpp"
#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::networks::shm {

Inbox::Inbox(std::uint32_t nranks)
    : fd_(base::memfd("marrow-shm-inbox", bytes(nranks))),
      mapping_(base::Mapping::of_fd(fd_.get(), bytes(nranks))) {
  header().magic = kInboxMagic;
  header().nranks = nranks;
}

Inbox::Inbox(base::Fd fd, std::uint32_t nranks) : fd_(std::move(fd)) {
  if (base::file_size(fd_.get()) != bytes(nranks) || !base::sealed_against_shrinking(fd_.get())) {
    throw Error(Code::version,
                base::cat("a peer's inbox has ", base::file_size(fd_.get()), " bytes instead of ",
                          bytes(nranks)),
                "run the same version of Marrow on every rank");
  }
  mapping_ = base::Mapping::of_fd(fd_.get(), bytes(nranks));
  if (header().magic != kInboxMagic || header().nranks != nranks) {
    throw Error(Code::version, "a peer's inbox has another layout",
                "run the same version of Marrow on every rank");
  }
}

}  // namespace marrow::networks::shm
