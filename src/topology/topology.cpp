// SPDX-License-Identifier: Apache-2.0
// GPUs by the driver, links by NVML when it is there, NICs and NUMA by sysfs.
#include "topology/topology.hpp"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>

#include "base/text.hpp"
#include "cuda/driver.hpp"
#include "marrow/error.hpp"

namespace marrow::topology {
namespace {

namespace fs = std::filesystem;

std::string read_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// Last part of where a link points to; "" when there is none.
std::string link_name(const fs::path& path) {
  std::error_code error;
  const fs::path target = fs::read_symlink(path, error);
  return error ? std::string() : target.filename().string();
}

std::string uuid_text(const std::uint8_t* bytes) {
  std::string out = "GPU-";
  for (int i = 0; i < 16; ++i) {
    char hex[4];
    std::snprintf(hex, sizeof(hex), "%02x", bytes[i]);
    if (i == 4 || i == 6 || i == 8 || i == 10) out += '-';
    out += hex;
  }
  return out;
}

cuda::NvmlDevice nvml_device(const std::string& uuid) {
  cuda::NvmlDevice device = nullptr;
  const cuda::Nvml* nvml = cuda::nvml();
  return nvml && nvml->device_by_uuid(uuid.c_str(), &device) == 0 ? device : nullptr;
}

/// NVML's view, which also knows GPUs that CUDA_VISIBLE_DEVICES hides from this process.
struct NvmlPair {
  bool nvlink = false, read = false, write = false, atomics = false;
};
std::optional<NvmlPair> nvml_pair(const std::string& from, const std::string& to) {
  const cuda::NvmlDevice a = nvml_device(from);
  const cuda::NvmlDevice b = nvml_device(to);
  if (a == nullptr || b == nullptr) return std::nullopt;
  const auto ok = [&](int capability) {  // NVML_P2P_STATUS_OK is 0
    int status = -1;
    return cuda::nvml()->p2p_status(a, b, capability, &status) == 0 && status == 0;
  };
  return NvmlPair{ok(2), ok(0), ok(1), ok(3)};
}

std::array<std::uint8_t, 16> uuid_of(int device) {
  cuda::Uuid uuid{};
  std::array<std::uint8_t, 16> out{};
  if (cuda::driver().device_uuid(&uuid, device) == cuda::Result::success)
    std::memcpy(out.data(), uuid.bytes, 16);
  return out;
}

/// Our own number for a GPU of another process; -1: hidden from us.
int ordinal_of(const std::array<std::uint8_t, 16>& uuid) {
  for (int i = 0; i < cuda::device_count(); ++i) {
    if (uuid_of(i) == uuid) return i;
  }
  return -1;
}

Reach reach_hidden_gpu(const Endpoint& me, const Endpoint& peer) {
  const std::string name = uuid_text(peer.uuid.data());
  Reach out;
  const auto pair = nvml_pair(uuid_text(me.uuid.data()), name);
  if (pair && pair->read && pair->write) {
    out.lsa = true;
    out.native_atomics = pair->atomics;
    out.link = pair->nvlink ? "NVLink" : "PCIe";
    return out;
  }
  out.link = "unknown";
  out.reason =
      base::cat("the peer's GPU ", name, " is hidden from this process (CUDA_VISIBLE_DEVICES) and ",
                pair ? "NVML reports no peer access to it" : "NVML cannot say how it is linked");
  return out;
}

}  // namespace

int numa_of_pci(const std::string& pci) {
  const std::string text = read_line(fs::path("/sys/bus/pci/devices") / pci / "numa_node");
  return text.empty() ? -1 : std::atoi(text.c_str());
}

std::string pci_of(const Place& place) {
  char text[32] = {};
  if (!place.on_gpu() || !cuda::available() ||
      cuda::driver().device_pci_bus_id(text, sizeof(text), place.device) != cuda::Result::success)
    return {};
  std::string pci = text;
  std::transform(pci.begin(), pci.end(), pci.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  return pci;
}

std::vector<Gpu> gpus() {
  std::vector<Gpu> out;
  if (!cuda::available()) return out;
  const cuda::Driver& cu = cuda::driver();
  const auto attribute = [&](cuda::DeviceAttribute which, int device) {
    int value = 0;
    return cu.device_attribute(&value, which, device) == cuda::Result::success ? value : 0;
  };
  for (int i = 0; i < cuda::device_count(); ++i) {
    Gpu gpu;
    gpu.ordinal = i;
    char text[96] = {};
    if (cu.device_name(text, sizeof(text), i) == cuda::Result::success) gpu.name = text;
    gpu.pci = pci_of(Place::gpu(i, nullptr));
    gpu.uuid = uuid_text(uuid_of(i).data());
    gpu.numa = numa_of_pci(gpu.pci);
    gpu.compute_capability = attribute(cuda::DeviceAttribute::compute_major, i) * 10 +
                             attribute(cuda::DeviceAttribute::compute_minor, i);
    gpu.multiprocessors = attribute(cuda::DeviceAttribute::multiprocessors, i);
    std::size_t memory = 0;
    if (cu.device_total_memory(&memory, i) == cuda::Result::success) gpu.memory = memory;
    out.push_back(std::move(gpu));
  }
  return out;
}

std::vector<Nic> nics() {
  std::vector<Nic> out;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/sys/class/infiniband", error)) {
    Nic nic;
    nic.name = entry.path().filename().string();
    const fs::path port = entry.path() / "ports" / "1";
    nic.link_layer = read_line(port / "link_layer");
    nic.state = read_line(port / "state");
    nic.rate = read_line(port / "rate");
    nic.driver = link_name(entry.path() / "device" / "driver");
    nic.pci = link_name(entry.path() / "device");
    nic.numa = nic.pci.empty() ? -1 : numa_of_pci(nic.pci);
    out.push_back(std::move(nic));
  }
  std::sort(out.begin(), out.end(), [](const Nic& a, const Nic& b) { return a.name < b.name; });
  return out;
}

GpuPair gpu_pair(int from, int to) {
  GpuPair out;
  if (from == to) return {true, true, "same GPU", {}};
  const cuda::Driver& cu = cuda::driver();
  int value = 0;
  out.access = cu.device_can_access_peer(&value, from, to) == cuda::Result::success && value != 0;
  value = 0;
  out.native_atomics = cu.device_p2p_attribute(&value, cuda::P2PAttribute::native_atomics, from,
                                               to) == cuda::Result::success &&
                       value != 0;
  const auto pair = nvml_pair(uuid_text(uuid_of(from).data()), uuid_text(uuid_of(to).data()));
  out.link = pair ? (pair->nvlink ? "NVLink" : "PCIe") : out.native_atomics ? "NVLink" : "unknown";
  if (!out.access) {
    out.reason = base::cat(
        "GPU ", from, " has no peer access to GPU ", to,
        " (no NVLink between them, and PCIe peer-to-peer is off: IOMMU, ACS or the hypervisor)");
  }
  return out;
}

Endpoint endpoint(const Place& place, std::uint64_t host, std::uint64_t process) {
  Endpoint out;
  out.host = host;
  out.process = process;
  if (!place.on_gpu()) return out;
  (void)cuda::driver();
  if (place.device < 0 || place.device >= cuda::device_count()) {
    throw Error(Code::invalid_argument,
                base::cat("GPU ", place.device, " does not exist: this process sees ",
                          cuda::device_count(), "."),
                "choose a smaller device number or change CUDA_VISIBLE_DEVICES");
  }
  out.device = place.device;
  out.uuid = uuid_of(place.device);
  return out;
}

Reach reach(const Endpoint& me, const Endpoint& peer) {
  Reach out;
  if (me.host != peer.host) {
    out.reason =
        "the ranks are on different hosts (or in containers that cannot pass descriptors to each "
        "other)";
    return out;
  }
  const bool gpu = me.device >= 0;
  if (gpu != (peer.device >= 0)) {
    out.reason = "one rank's kernels run on a GPU, the other's on the CPU device";
    return out;
  }
  if (!gpu) {
    out.lsa = true;
    out.link = "memory";
    return out;
  }
  const int device = me.process == peer.process ? peer.device : ordinal_of(peer.uuid);
  if (device < 0) return reach_hidden_gpu(me, peer);
  const GpuPair pair = gpu_pair(me.device, device);
  out.lsa = pair.access;
  out.native_atomics = pair.native_atomics;
  out.link = pair.link;
  out.reason = pair.reason;
  if (device == me.device && me.process != peer.process) {
    out.reason =
        base::cat("two processes share GPU ", device,
                  ": without MPS they take turns on it and each waits through the other's turn; "
                  "make them thread ranks of one process");
  }
  if (out.lsa && !out.native_atomics) {
    // Signals are 64-bit reductions at the peer: without native atomics they would not be atomic.
    out.lsa = false;
    out.reason = base::cat("GPU ", me.device, " reaches GPU ", device, " by ", out.link,
                           ", which has no 64-bit atomics, so signals would lose counts");
  }
  return out;
}

}  // namespace marrow::topology
