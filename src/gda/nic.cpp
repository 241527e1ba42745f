// SPDX-License-Identifier: Apache-2.0
#include "gda/nic.hpp"

#include <cstring>
#include <span>
#include <string_view>
#include <vector>

#include "base/log.hpp"
#include "base/random.hpp"
#include "base/text.hpp"
#include "gda/connection.hpp"
#include "gda/device.hpp"
#include "marrow/abi/mlx5_wqe.h"

namespace marrow::gda {
namespace {

using base::cat;

/// What one rank found, as bytes for the others: outcome byte, then text. Nobody may go on alone.
struct Attempt {
  std::shared_ptr<Device> device;
  std::string text;  ///< why not, or the device's name
};

template <class Try>
Attempt attempt(Try&& open) {
  try {
    Attempt a{open(), {}};
    a.text = a.device->name();
    return a;
  } catch (const Error& error) {
    return {nullptr, error.sentence()};
  }
}

/// Whether every rank's attempt went well; else `tried` gets each distinct reason.
bool all_succeeded(bootstrap::Bootstrap& bootstrap, const Attempt& mine, const std::string& what,
                   std::string& tried) {
  const std::string bytes = (mine.device ? "+" : "-") + mine.text;
  const auto all = bootstrap.allgather(std::as_bytes(std::span(bytes.data(), bytes.size())));
  bool good = true;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].empty()) continue;  // masked
    const std::string text(reinterpret_cast<const char*>(all[r].data()), all[r].size());
    if (text[0] == '+') continue;
    const std::string reason = cat(what, ": ", text.substr(1));
    if (tried.find(reason) == std::string::npos)
      tried += cat(tried.empty() ? "" : "; ", reason, " (rank ", r, ")");
    good = false;
  }
  return good;
}

bool one_host(bootstrap::Bootstrap& bootstrap) {
  const std::vector<bool> masked = bootstrap.mask();
  for (int r = 0; r < bootstrap.nranks(); ++r) {
    if ((r >= static_cast<int>(masked.size()) || !masked[r]) && !bootstrap.same_host(r))
      return false;
  }
  return true;
}

void same_choice(bootstrap::Bootstrap& bootstrap, const std::string& mine) {
  const auto all = bootstrap.allgather(std::as_bytes(std::span(mine.data(), mine.size())));
  for (std::size_t r = 0; r < all.size(); ++r) {
    const std::string theirs(reinterpret_cast<const char*>(all[r].data()), all[r].size());
    if (theirs.empty() || theirs == mine) continue;
    throw Error(Code::mismatch,
                cat("rank ", r, " has ", theirs, ", rank ", bootstrap.rank(), " has ", mine),
                "set MARROW_NIC, MARROW_GDA_DEPTH and MARROW_GDA_CQ alike on every rank");
  }
}

}  // namespace

std::unique_ptr<Nic> Nic::open(bootstrap::Bootstrap& bootstrap, const base::Parameters& parameters,
                               const Place& place) {
  const std::string choice = base::parameter_string("MARROW_NIC", parameters);
  QueueOptions options;
  options.depth = static_cast<std::uint32_t>(base::parameter_int("MARROW_GDA_DEPTH", parameters));
  options.collapsed = base::parameter_string("MARROW_GDA_CQ", parameters) == "collapsed";
  options.gid_index = static_cast<int>(base::parameter_int("MARROW_GID_INDEX", parameters));
  options.service_level =
      static_cast<std::uint8_t>(base::parameter_int("MARROW_VERBS_SERVICE_LEVEL", parameters));
  options.traffic_class =
      static_cast<std::uint8_t>(base::parameter_int("MARROW_VERBS_TRAFFIC_CLASS", parameters));
  same_choice(bootstrap, cat("MARROW_NIC=", choice, " MARROW_GDA_DEPTH=", options.depth,
                             " MARROW_GDA_CQ=", options.collapsed ? "collapsed" : "ring"));
  const char* next =
      "`marrow info` shows what was found, `marrow doctor` all that a real NIC needs; "
      "MARROW_NIC=softnic emulates one on one host";
  if (choice == "none")
    throw Error(Code::unsupported, "no NIC for the gda path: MARROW_NIC=none", next);

  std::string tried;
  if (choice != "softnic" && choice.rfind("softnic", 0) != 0) {
    const verbs::NicName wanted = choice == "auto" ? verbs::NicName{} : verbs::parse_nic(choice);
    const std::string& name = wanted.device;
    options.port = wanted.port;
    Attempt real = attempt([&] { return Device::open("system", name, "", "", place, options); });
    if (all_succeeded(bootstrap, real, "a real NIC", tried)) {
      MARROW_INFO(gda, "NIC ", real.device->name());
      return std::unique_ptr<Nic>(new Nic(std::move(real.device)));
    }
    if (choice != "auto")
      throw Error(Code::unsupported, cat("no NIC for the gda path: ", tried), next);
  }
  if (!one_host(bootstrap)) {
    throw Error(Code::unsupported,
                cat("no NIC for the gda path: ", tried, tried.empty() ? "" : "; ",
                    "softnic: the ranks are on several hosts"),
                next);
  }
  // The lowest live rank names the job; the name is unpredictable, so no other job's queues are reached.
  const std::string proposal = "marrow-" + base::random_name(12);
  const auto names =
      bootstrap.allgather(std::as_bytes(std::span(proposal.data(), proposal.size())));
  std::string job;
  for (const auto& name : names) {
    if (name.empty()) continue;
    job.assign(reinterpret_cast<const char*>(name.data()), name.size());
    break;
  }
  const std::string faults = base::parameter_string("MARROW_SOFTNIC", parameters);
  Attempt soft = attempt([&] { return Device::open("softnic", "", job, faults, place, options); });
  if (!all_succeeded(bootstrap, soft, "softnic", tried)) {
    // softnic is behind a C interface: that its options are bad is only in its text, which all ranks have.
    constexpr std::string_view bad = "invalid_argument: ";
    if (const std::size_t at = tried.find(cat(bad, "softnic ")); at != std::string::npos)
      throw Error(Code::invalid_argument, cat("MARROW_SOFTNIC: ", tried.substr(at + bad.size())));
    throw Error(Code::unsupported, cat("no NIC for the gda path: ", tried), next);
  }
  MARROW_INFO(gda, "NIC ", soft.device->name(), ", job ", job);
  return std::unique_ptr<Nic>(new Nic(std::move(soft.device)));
}

Nic::~Nic() = default;

const std::string& Nic::name() const { return device_->name(); }
bool Nic::emulated() const { return device_->emulated(); }

bool Nic::on_gpu_engine() const { return device_->on_gpu_engine(); }

bool Nic::can_use(Memory kind, std::string* why) const {
  if (kind == Memory::host || !device_->emulated()) return true;
  if (device_->refuses_gpu_memory().empty()) return true;
  if (why) *why = device_->refuses_gpu_memory();
  return false;
}

void Nic::choose_engine(bootstrap::Bootstrap& bootstrap) {
  if (engine_chosen_ || !device_->emulated() || !device_->place().on_gpu()) return;
  const std::byte mine{gpu_memory_};
  bool somewhere = false;
  for (const auto& theirs : bootstrap.allgather(std::span(&mine, 1)))
    somewhere = somewhere || (!theirs.empty() && theirs[0] != std::byte{0});
  std::string tried;
  const Attempt chosen = attempt([&] {
    device_->choose_engine(somewhere);
    return device_;
  });
  if (!all_succeeded(bootstrap, chosen, "softnic's engine", tried))
    throw Error(Code::network, tried);
  engine_chosen_ = true;
}

Memory Nic::sync_memory() const {
  // A real NIC's: beside the data of windows, because it orders its writes to one memory only.
  const bool real = !device_->emulated() && device_->place().on_gpu();
  return real || device_->on_gpu_engine() ? Memory::device : Memory::host;
}

Region Nic::register_region(const memory::Block& block, Access access) {
  std::string why;
  if (!can_use(block.kind, &why)) {
    throw Error(Code::unsupported,
                cat("registering ", block.bytes, " bytes with ", name(), ": ", why),
                "use Memory::host");
  }
  const verbs::Table& table = device_->table();
  std::byte* address = block.host ? block.host : block.device;
  gpu_memory_ = gpu_memory_ || (block.kind == Memory::device && !block.host);
  unsigned rights = verbs::IBV_ACCESS_LOCAL_WRITE;
  if (access != Access::local) {
    rights |= verbs::IBV_ACCESS_REMOTE_WRITE | verbs::IBV_ACCESS_REMOTE_READ |
              verbs::IBV_ACCESS_REMOTE_ATOMIC;
  }
  // Order between a put's data and its signal comes from the signal's region, so only data may relax it.
  if (access == Access::data && !device_->emulated() && table.reg_mr_iova2)
    rights |= verbs::IBV_ACCESS_RELAXED_ORDERING;

  verbs::Memory memory;
  memory.address = address;
  memory.bytes = block.bytes;
  memory.gpu = block.host == nullptr;
  // softnic: other processes map the memory by its descriptor.
  const bool shared = access != Access::local && (block.host || block.kind == Memory::device);
  memory.fd = shared ? block.fd : -1;
  memory.fd_offset = block.fd_offset;
  verbs::ibv_mr* mr = device_->register_memory(memory, rights);
  const auto iova = reinterpret_cast<std::uint64_t>(address);
  return {iova, mlx5::to_big32(mr->lkey), mlx5::to_big32(mr->rkey), mr};
}

void Nic::deregister(Region& region) noexcept {
  if (!region.handle) return;
  if (device_->table().dereg_mr(static_cast<verbs::ibv_mr*>(region.handle)) != 0) {
    MARROW_WARN(gda, name(), ": deregistering memory: ", device_->failure());
  }
  region = {};
}

std::unique_ptr<Queues> Nic::connect(bootstrap::Bootstrap& bootstrap, memory::Arena& arena,
                                     const Requirements& requirements, const Region* counters) {
  return std::make_unique<Connection>(device_, bootstrap, arena, requirements, counters);
}

}  // namespace marrow::gda
