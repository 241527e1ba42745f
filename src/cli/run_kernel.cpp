// SPDX-License-Identifier: Apache-2.0
#include "cli/run_kernel.hpp"

#include <algorithm>

#include "cli/gpu.hpp"
#include "cli/text.hpp"

namespace marrow::cli {

KernelLog::KernelLog(const Place& place, int blocks, std::size_t samples)
    : blocks_(blocks),
      status_(place, static_cast<std::size_t>(blocks) * sizeof(std::uint32_t)),
      start_(place, static_cast<std::size_t>(blocks) * sizeof(std::uint64_t)),
      end_(place, static_cast<std::size_t>(blocks) * sizeof(std::uint64_t)),
      sample_(place, samples * sizeof(std::uint64_t)),
      awaited_(place, static_cast<std::size_t>(blocks) * sizeof(std::uint32_t)) {}

Log KernelLog::log() const {
  return {status_.as<std::uint32_t>(), start_.as<std::uint64_t>(), end_.as<std::uint64_t>(),
          sample_.as<std::uint64_t>(), awaited_.as<std::uint32_t>()};
}

void KernelLog::finish(Communicator& comm, const std::string& what) const {
  comm.synchronize();
  const auto status = status_.download<std::uint32_t>(static_cast<std::size_t>(blocks_));
  const auto worst = std::max_element(status.begin(), status.end());
  if (*worst == 0) return;
  comm.check();  // has the better sentence when something failed asynchronously
  const auto code = static_cast<Status>(*worst);
  const auto block = worst - status.begin();
  const std::uint32_t awaited = awaited_.download<std::uint32_t>(
      static_cast<std::size_t>(blocks_))[static_cast<std::size_t>(block)];
  const std::string whom = awaited ? format(", waiting for rank %u", awaited - 1) : "";
  throw Error(code == Status::timeout       ? Code::timeout
              : code == Status::peer_failed ? Code::peer_failed
              : code == Status::aborted     ? Code::aborted
                                            : Code::internal,
              format("%s ended with %s on rank %d, block %d%s", what.c_str(), name(code),
                     comm.rank(), static_cast<int>(block), whom.c_str()),
              code == Status::timeout
                  ? (awaited ? format("see what rank %u does; MARROW_WAIT_TIMEOUT bounds each wait",
                                      awaited - 1)
                             : "run with MARROW_DEBUG=INFO; MARROW_WAIT_TIMEOUT bounds each wait")
                  : "run with MARROW_DEBUG=INFO to see what happened first");
}

std::uint64_t KernelLog::elapsed_ns() const {
  const auto blocks = static_cast<std::size_t>(blocks_);
  const auto start = start_.download<std::uint64_t>(blocks);
  const auto end = end_.download<std::uint64_t>(blocks);
  return *std::max_element(end.begin(), end.end()) - *std::min_element(start.begin(), start.end());
}

std::vector<std::uint64_t> KernelLog::samples(std::size_t first, std::size_t count) const {
  return sample_.download<std::uint64_t>(count, first);
}

PathUse path_use(const Communicator& comm, int peer) {
  PathUse use;
  const Place place = comm.place();
  if (place.on_gpu()) {
    use.devices.push_back({"kernels", DeviceClass::gpu, gpu::name(place.device)});
  } else {
    use.devices.push_back({"kernels", DeviceClass::cpu_device, "threads"});
  }
  const std::vector<PeerInfo> peers = comm.peers();
  const PeerInfo& info = peers.at(static_cast<std::size_t>(peer));
  use.path = name(info.path);
  const std::size_t on = info.transport.rfind(" on ");
  if (info.path == Path::lsa) return use;
  use.network = on == std::string::npos ? "" : info.transport.substr(on + 4);
  // On the CPU device everything is emulated, so a softnic is known by its name there.
  const bool softnic = use.network.rfind("softnic", 0) == 0 || (place.on_gpu() && info.emulated);
  if (info.path == Path::proxy) use.devices.push_back({"proxy", DeviceClass::host, "thread"});
  if (softnic) {
    use.devices.push_back({"network", DeviceClass::softnic, use.network});
  } else if (info.path == Path::gda) {
    use.devices.push_back({"network", DeviceClass::nic, use.network});
  } else {
    use.devices.push_back({"network", DeviceClass::host, use.network});
  }
  return use;
}

Row make_row(const PathUse& use, std::string what, std::string unit) {
  Row row;
  row.what = std::move(what);
  row.unit = std::move(unit);
  row.path = use.path;
  row.network = use.network;
  row.devices = use.devices;
  row.kind = kind_of(use.devices);
  return row;
}

Memory default_memory(const Place& place, Path path) {
  return place.on_gpu() && path != Path::lsa ? Memory::host : Memory::device;
}

}  // namespace marrow::cli
