// SPDX-License-Identifier: Apache-2.0
#include "verbs/registration.hpp"

#include <sys/resource.h>

#include <cerrno>

#include "base/log.hpp"
#include "base/system_error.hpp"
#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::verbs {
namespace {

using base::cat;

constexpr std::uint64_t kPage = 4096;

ibv_mr* by_address(const Table& table, ibv_pd* pd, const Memory& memory, unsigned rights) {
  const auto address = reinterpret_cast<std::uint64_t>(memory.address);
  if (table.reg_mr_iova2)
    return table.reg_mr_iova2(pd, memory.address, memory.bytes, address, rights);
  return table.reg_mr(pd, memory.address, memory.bytes,
                      static_cast<int>(rights & ~unsigned{IBV_ACCESS_RELAXED_ORDERING}));
}

/// Tells softnic the file for the time of the call: what is registered keeps its own descriptor.
class Exposed {
 public:
  Exposed(const Table& table, ibv_context* context, const Memory& memory)
      : table_(table), context_(context) {
    if (!table.expose_memory || memory.fd < 0) return;
    auto* address = static_cast<std::byte*>(memory.address);
    const std::uint64_t before = reinterpret_cast<std::uintptr_t>(address) % kPage;
    if (memory.fd_offset >= before &&
        table.expose_memory(context, address - before, memory.bytes + before, memory.fd,
                            memory.fd_offset - before) == 0) {
      at_ = address - before;
    } else {
      MARROW_INFO(verbs, "memory at ", memory.address,
                  " stays within this process: ", last_failure(table, errno));
    }
  }
  ~Exposed() {
    if (at_) table_.withdraw_memory(context_, at_);
  }
  Exposed(const Exposed&) = delete;
  Exposed& operator=(const Exposed&) = delete;

 private:
  const Table& table_;
  ibv_context* context_;
  std::byte* at_ = nullptr;
};

Error refused(const Memory& memory, const std::string& nic, int error, const std::string& words) {
  const std::string what = cat("registering ", memory.bytes, " bytes at ", memory.address,
                               memory.gpu ? " of GPU memory" : "", " with ", nic, " failed: ");
  if (memory.gpu) {
    return {
        error == ENOMEM ? Code::out_of_memory : Code::unsupported, what + words,
        "load nvidia_peermem (modprobe nvidia_peermem), or take kernel 5.12 and GPU driver 515 or "
        "newer for dma-buf; else use Memory::host"};
  }
  switch (error) {
    case ENOMEM:
    case EAGAIN:
    case ENOSPC:
      return {Code::out_of_memory, cat(what, words, "; ", locked_memory_limit()),
              "raise `ulimit -l` (memlock in /etc/security/limits.conf, --ulimit memlock=-1 for "
              "containers), or register less"};
    case EFAULT:
    case EINVAL:
    case EACCES:
      return {Code::invalid_argument, what + words,
              "give memory that is mapped, and writable if peers write to it"};
    default: return {Code::network, what + words, "look at the kernel's log and `ibv_devinfo`"};
  }
}

}  // namespace

std::string last_failure(const Table& table, int error) {
  const char* words = table.last_error ? table.last_error() : "";
  return *words ? std::string(words) : base::errno_text(error);
}

std::string locked_memory_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "the limit of locked memory is unknown";
  if (limit.rlim_cur == RLIM_INFINITY) return "locked memory is not limited";
  return cat("locked memory is limited to ", limit.rlim_cur / 1024, " KiB");
}

Registration register_memory(const Table& table, ibv_context* context, ibv_pd* pd,
                             const Memory& memory, unsigned rights, const DmaBuf& dma_buf,
                             const std::string& nic) {
  const bool soft = table.open_device_in_job != nullptr;
  if (!memory.gpu || soft) {
    const Exposed exposed(table, context, memory);
    errno = 0;
    if (ibv_mr* region = by_address(table, pd, memory, rights))
      return {region, memory.gpu ? "GPU memory of softnic" : "host memory"};
    const int error = errno;
    throw refused(memory, nic, error, last_failure(table, error));
  }
  std::string why;
  if (!table.reg_dmabuf_mr) {
    why = "this libibverbs has no ibv_reg_dmabuf_mr";
  } else if (!dma_buf) {
    why = "nothing exports it";
  } else {
    std::uint64_t offset = 0;
    if (const base::Fd fd = dma_buf(memory.address, memory.bytes, offset, why)) {
      // The kernel keeps the buffer: the descriptor may be closed.
      if (ibv_mr* region = table.reg_dmabuf_mr(pd, offset, memory.bytes,
                                               reinterpret_cast<std::uint64_t>(memory.address),
                                               fd.get(), static_cast<int>(rights)))
        return {region, "dma-buf"};
      why = base::errno_text(errno);
    }
  }
  MARROW_INFO(verbs, "GPU memory is not registered as a dma-buf (", why,
              "); by its address then, through nvidia_peermem");
  errno = 0;
  if (ibv_mr* region = by_address(table, pd, memory, rights)) return {region, "peer memory"};
  const int error = errno;
  throw refused(memory, nic, error,
                cat("as a dma-buf: ", why, "; by its address: ", base::errno_text(error)));
}

}  // namespace marrow::verbs
