// SPDX-License-Identifier: Apache-2.0
// The GPU arena on real GPUs: what one rank writes through a mapped, imported or aliased block is
// there for the owner, and no arena call waits for a spinning kernel. A plain program, because the
// process part has to fork before CUDA starts. Exits 77 when there are not two GPUs.
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "cuda/driver.hpp"
#include "marrow/error.hpp"
#include "memory/arena.hpp"
#include "topology/topology.hpp"

namespace {

using marrow::Memory;
using marrow::Place;
using marrow::memory::Arena;
using marrow::memory::Block;
using marrow::memory::ExportRecord;

constexpr std::uint64_t kBytes = 4 << 20;
int failures = 0;

void expect(bool ok, const std::string& what) {
  if (!ok) ++failures;
  std::printf("  %s %s\n", ok ? "ok  " : "FAIL", what.c_str());
  std::fflush(stdout);
}

void must(cudaError_t result, const char* what) {
  if (result == cudaSuccess) return;
  std::printf("FAIL %s: %s\n", what, cudaGetErrorString(result));
  std::exit(1);
}

__global__ void fill(std::uint64_t* to, std::uint64_t words, std::uint64_t seed) {
  for (std::uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words;
       i += gridDim.x * blockDim.x)
    to[i] = seed + i;
}
__global__ void count_wrong(const std::uint64_t* from, std::uint64_t words, std::uint64_t seed,
                            unsigned long long* wrong) {
  for (std::uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < words;
       i += gridDim.x * blockDim.x) {
    if (from[i] != (seed == ~0ull ? 0 : seed + i)) atomicAdd(wrong, 1ull);
  }
}
/// Spins until the host stores 1, at most `limit_ns`.
__global__ void spin(const volatile std::uint64_t* flag, std::uint64_t limit_ns,
                     std::uint64_t* seen) {
  std::uint64_t start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (*flag == 0 && now - start < limit_ns);
  *seen = *flag;
}

void write_from(int device, const Block& block, std::uint64_t seed, std::uint64_t bytes = kBytes) {
  must(cudaSetDevice(device), "set device");
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  fill<<<32, 256, 0, stream>>>(reinterpret_cast<std::uint64_t*>(block.device), bytes / 8, seed);
  must(cudaGetLastError(), "launch");
  must(cudaStreamSynchronize(stream), "fill");
  must(cudaStreamDestroy(stream), "stream");
}

/// seed ~0: expects zeros.
std::uint64_t wrong_words(int device, const Block& block, std::uint64_t seed,
                          std::uint64_t bytes = kBytes) {
  must(cudaSetDevice(device), "set device");
  unsigned long long *wrong, host = 0;
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  must(cudaMalloc(&wrong, 8), "malloc");
  must(cudaMemsetAsync(wrong, 0, 8, stream), "memset");
  count_wrong<<<32, 256, 0, stream>>>(reinterpret_cast<const std::uint64_t*>(block.device),
                                      bytes / 8, seed, wrong);
  must(cudaMemcpyAsync(&host, wrong, 8, cudaMemcpyDeviceToHost, stream), "copy");
  must(cudaStreamSynchronize(stream), "count");
  must(cudaFree(wrong), "free");
  must(cudaStreamDestroy(stream), "stream");
  return host;
}

void one_gpu() {
  std::printf("one GPU\n");
  const auto arena = Arena::create(Place::gpu(0));
  const Block device = arena->allocate(kBytes + 8, Memory::device);
  expect(wrong_words(0, device, ~0ull) == 0, "a device block is zeroed");
  expect(device.host == nullptr && device.fd >= 0 && device.kind == Memory::device,
         "a device block has a descriptor, no host address");
  const Block host = arena->allocate(kBytes, Memory::host);
  expect(wrong_words(0, host, ~0ull) == 0, "a host block is zeroed");
  expect(host.device == host.host, "a host block has one address");
  write_from(0, host, 7);
  expect(reinterpret_cast<std::uint64_t*>(host.host)[100] == 107, "the CPU sees the GPU's stores");
  std::vector<std::uint64_t> table(20000);
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = 1000 + i;
  Block view;
  view.device = static_cast<std::byte*>(arena->upload(table.data(), table.size() * 8));
  expect(wrong_words(0, view, 1000, table.size() * 8) == 0, "an uploaded table arrives");
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = 5000 + i;
  arena->update(view.device, 0, table.data(), table.size() * 8);
  expect(wrong_words(0, view, 5000, table.size() * 8) == 0, "an update arrives");
  const std::uint8_t byte = 0xff;
  std::vector<std::uint8_t> bytes(5, 1);
  auto* small = static_cast<std::uint8_t*>(arena->upload(bytes.data(), bytes.size()));
  arena->update(small, 3, &byte, 1);
  std::uint8_t back[5];
  must(cudaMemcpy(back, small, 5, cudaMemcpyDefault), "copy back");
  expect(back[2] == 1 && back[3] == 0xff && back[4] == 1, "one byte of a table changes");
  arena->release(device);
  arena->release(host);
  std::size_t free_before = 0, free_after = 0, total = 0;
  must(cudaMemGetInfo(&free_before, &total), "memory info");
  for (int i = 0; i < 50; ++i) {
    const Block a = arena->allocate(64 << 20, Memory::device);
    const Block b = arena->allocate(1 << 20, Memory::host);
    arena->release(a);
    arena->release(b);
  }
  must(cudaMemGetInfo(&free_after, &total), "memory info");
  expect(free_before - free_after < (64 << 20), "50 allocate/release cycles leak no GPU memory");
}

void two_gpus_as_threads() {
  std::printf("two GPUs, one process\n");
  const auto a0 = Arena::create(Place::gpu(0));
  const auto a1 = Arena::create(Place::gpu(1));
  const Block block = a0->allocate(kBytes, Memory::device);
  const Block seen = a1->alias(block, Place::gpu(0));
  expect(seen.device == block.device, "an alias keeps the address");
  (void)Arena::create(Place::gpu(1))->alias(block, Place::gpu(0));  // a second rank on GPU 1
  write_from(1, seen, 31);
  expect(wrong_words(0, block, 31) == 0, "GPU 1 writes GPU 0's VMM block");
  bool together = true;
  for (int round = 0; round < 20; ++round) {
    const Block mine = a0->allocate(kBytes, Memory::device);
    const auto b1 = Arena::create(Place::gpu(1));
    std::thread second([&] { (void)b1->alias(mine, Place::gpu(0)); });
    (void)a1->alias(mine, Place::gpu(0));
    second.join();
    write_from(1, mine, 100 + round);
    together = together && wrong_words(0, mine, 100 + round) == 0;
    a0->release(mine);
  }
  expect(together, "two ranks on GPU 1 alias one block of GPU 0 at once");
  void* other = nullptr;
  must(cudaSetDevice(0), "set device");
  must(cudaMalloc(&other, kBytes), "malloc");
  const Block adopted = a0->adopt(other, kBytes);
  const Block seen2 = a1->alias(adopted, Place::gpu(0));
  write_from(1, seen2, 47);
  expect(wrong_words(0, adopted, 47) == 0, "GPU 1 writes GPU 0's cudaMalloc memory");
  const Block host = a0->allocate(kBytes, Memory::host);
  const Block host1 = a1->alias(host, Place::gpu(0));
  write_from(1, host1, 59);
  expect(reinterpret_cast<std::uint64_t*>(host.host)[5] == 64,
         "GPU 1 writes a host block registered by GPU 0's arena");
  bool refused = false;
  try {
    (void)a1->adopt(other, kBytes);
  } catch (const marrow::Error& error) {
    refused = error.code() == marrow::Code::unsupported;
    std::printf("       %s\n", error.what());
  }
  expect(refused, "another GPU's memory is refused with a reason");
  refused = false;
  try {
    (void)a0->adopt(other, kBytes * 64);
  } catch (const marrow::Error& error) {
    refused = error.code() == marrow::Code::unsupported;
    std::printf("       %s\n", error.what());
  }
  expect(refused, "a range past its allocation is refused");
  std::vector<std::uint64_t> pageable(kBytes / 8);
  const Block local = a0->adopt(pageable.data(), kBytes);
  write_from(0, local, 71);
  expect(pageable[9] == 80, "ordinary host memory is registered on adoption");
  a0->release(local);
  a0->release(adopted);
  must(cudaFree(other), "free");
}

double milliseconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

void beside_a_spinning_kernel() {
  std::printf("beside a spinning kernel on each GPU\n");
  const auto a0 = Arena::create(Place::gpu(0));
  const auto a1 = Arena::create(Place::gpu(1));
  const Block control = a0->allocate(4096, Memory::host);
  const Block peer = a1->allocate(kBytes, Memory::device);
  std::uint64_t word = 1;
  void* table = a0->upload(&word, 8);  // staging and chunk exist now
  auto* flag = reinterpret_cast<std::uint64_t*>(control.host);
  for (int d = 0; d < 2; ++d) {
    must(cudaSetDevice(d), "set device");
    spin<<<1, 1>>>(flag, 4000000000ull,
                   flag + 1 + d);  // on the legacy default stream: the hard case
    must(cudaGetLastError(), "launch");
  }
  const struct {
    const char* name;
    std::function<void()> body;
  } calls[] = {
      {"update a table",
       [&] {
         word = 2;
         a0->update(table, 0, &word, 8);
       }},
      {"upload a small table", [&] { (void)a0->upload(&word, 8); }},
      {"upload 4 MiB (new memory)",
       [&] {
         std::vector<char> big(kBytes);
         (void)a0->upload(big.data(), big.size());
       }},
      {"allocate device", [&] { (void)a0->allocate(kBytes, Memory::device); }},
      {"alias", [&] { (void)a0->alias(peer, Place::gpu(1)); }},
      {"allocate and release device", [&] { a0->release(a0->allocate(kBytes, Memory::device)); }},
      {"allocate host", [&] { (void)a0->allocate(kBytes, Memory::host); }},
  };
  for (const auto& call : calls) {
    const double ms = milliseconds(call.body);
    expect(ms < 1000, std::string(call.name) + ": " + std::to_string(ms) + " ms");
  }
  std::atomic_ref<std::uint64_t>(*flag).store(1);
  for (int d = 0; d < 2; ++d) {
    must(cudaSetDevice(d), "set device");
    must(cudaDeviceSynchronize(), "spin");
  }
  expect(flag[1] == 1 && flag[2] == 1, "both kernels were still running and saw the flag");
  // Releasing registered host memory is the one call that waits for kernels (cuMemHostUnregister does).
  a0->release(a0->allocate(kBytes, Memory::host));
}

// ---- processes ----

void send_block(int socket, const ExportRecord& record, int fd) {
  char control[CMSG_SPACE(sizeof(int))] = {};
  iovec data{const_cast<ExportRecord*>(&record), sizeof(record)};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &fd, sizeof(int));
  }
  if (::sendmsg(socket, &message, 0) != sizeof(record)) std::exit(1);
}

ExportRecord receive_block(int socket, int* fd) {
  ExportRecord record;
  char control[CMSG_SPACE(sizeof(int))] = {};
  iovec data{&record, sizeof(record)};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (::recvmsg(socket, &message, 0) != sizeof(record)) std::exit(1);
  *fd = -1;
  if (cmsghdr* head = CMSG_FIRSTHDR(&message)) std::memcpy(fd, CMSG_DATA(head), sizeof(int));
  return record;
}

void token(int socket, bool send) {
  char c = 'x';
  if ((send ? ::write(socket, &c, 1) : ::read(socket, &c, 1)) != 1) std::exit(1);
}

/// Process 0 owns blocks on GPU 0; process 1 maps them for GPU 1 and writes.
void process(int rank, int socket) {
  ::alarm(60);
  const auto arena = Arena::create(Place::gpu(rank));
  const char* names[] = {"VMM by descriptor", "memfd by descriptor",
                         "cudaMalloc by IPC handle, at an offset",
                         "somebody else's VMM memory, at an offset"};
  if (rank == 0) {
    void* plain = nullptr;
    must(cudaSetDevice(0), "set device");
    must(cudaMalloc(&plain, kBytes + 4096), "malloc");
    const auto stranger = Arena::create(Place::gpu(0));
    const Block foreign = stranger->allocate(kBytes + (2 << 20), Memory::device);
    const Block blocks[] = {arena->allocate(kBytes, Memory::device),
                            arena->allocate(kBytes, Memory::host),
                            arena->adopt(static_cast<char*>(plain) + 4096, kBytes),
                            arena->adopt(foreign.device + 512, kBytes)};
    for (int i = 0; i < 4; ++i) {
      send_block(socket, arena->export_record(blocks[i]), blocks[i].fd);
      token(socket, false);
      expect(wrong_words(0, blocks[i], 1000 + i) == 0,
             std::string("a peer process writes: ") + names[i]);
      token(socket, true);
    }
    arena->release(blocks[2]);
    must(cudaFree(plain), "free");
  } else {
    for (int i = 0; i < 4; ++i) {
      int fd = -1;
      const ExportRecord record = receive_block(socket, &fd);
      const Block block = arena->map_record(record, fd);
      if (fd >= 0) ::close(fd);
      write_from(1, block, 1000 + i);
      token(socket, true);
      token(socket, false);
      arena->release(block);
    }
  }
}

int two_processes() {
  std::printf("two GPUs, two processes\n");
  std::fflush(stdout);
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets) != 0) return 1;
  pid_t children[2];
  for (int r = 0; r < 2; ++r) {
    children[r] = ::fork();
    if (children[r] == 0) {
      ::close(sockets[1 - r]);
      try {
        process(r, sockets[r]);
      } catch (const std::exception& error) {
        std::printf("FAIL rank %d: %s\n", r, error.what());
        failures = 1;
      }
      std::fflush(stdout);
      std::_Exit(failures ? 1 : 0);
    }
  }
  ::close(sockets[0]);
  ::close(sockets[1]);
  int bad = 0;
  for (pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    bad += status != 0;
  }
  return bad;
}

}  // namespace

int main() {
  ::alarm(120);  // the host's watchdog
  // Whether there are GPUs is asked in a child, so that CUDA has not started when ranks are forked.
  const pid_t probe = ::fork();
  if (probe == 0) std::_Exit(marrow::cuda::device_count() >= 2 ? 0 : 77);
  int status = 0;
  ::waitpid(probe, &status, 0);
  if (status != 0) {
    std::printf("skipped: needs two GPUs\n");
    return 77;
  }
  failures += two_processes();
  try {
    for (const auto& gpu : marrow::topology::gpus()) {
      std::printf("GPU %d %s %s %s numa %d sm_%d %d SMs\n", gpu.ordinal, gpu.name.c_str(),
                  gpu.uuid.c_str(), gpu.pci.c_str(), gpu.numa, gpu.compute_capability,
                  gpu.multiprocessors);
    }
    const auto pair = marrow::topology::gpu_pair(0, 1);
    std::printf("0 -> 1: access %d, native atomics %d, %s\n", pair.access, pair.native_atomics,
                pair.link.c_str());
    expect(pair.access && pair.native_atomics, "peer access with native atomics");
    one_gpu();
    two_gpus_as_threads();
    beside_a_spinning_kernel();
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    ++failures;
  }
  std::printf(failures ? "%d FAILED\n" : "all passed\n", failures);
  return failures ? 1 : 0;
}
