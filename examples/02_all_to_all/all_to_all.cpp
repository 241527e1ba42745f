// SPDX-License-Identifier: Apache-2.0
// All-to-all among four ranks: every rank sends row p of its matrix to rank p. One strong signal a
// peer covers the row; one wait for all of them is enough.
#include <cstdio>
#include <cstring>
#include <marrow/device.cuh>
#include <marrow/marrow.hpp>
#include <thread>
#include <vector>

constexpr int kRanks = 4;
constexpr int kColumns = 1000;
constexpr std::uint64_t kRow = kColumns * sizeof(int);

MARROW_KERNEL all_to_all(marrow::DeviceCommunicator comm, marrow::WindowHandle out,
                         marrow::WindowHandle in, marrow::Status* status) {
  const marrow::Gin gin(comm, 0);
  const marrow::Block block;
  marrow::Status worst = marrow::Status::ok;
  for (int i = 0; i < comm.nranks; ++i) {
    const int peer = (comm.rank + i) % comm.nranks;  // everybody starts with another peer
    worst = worse(worst, gin.put(peer, in, comm.rank * kRow, out, peer * kRow, kRow,
                                 marrow::SignalAdd{0, 1}, block));
  }
  worst = worse(worst, gin.wait_signal(0, comm.nranks, block));
  worst = worse(worst, gin.flush(block));  // our rows may be overwritten now
  if (marrow::thread_index() == 0) *status = worst;
}

void run(const marrow::UniqueId& id, int rank, bool gpu) {
  marrow::Config config;
  if (gpu) config.place = marrow::Place::gpu(rank);
  marrow::Communicator comm(id, kRanks, rank, config);
  marrow::Window out = comm.allocate(kRanks * kRow, marrow::Memory::host);
  marrow::Window in = comm.allocate(kRanks * kRow, marrow::Memory::host);
  marrow::Window result = comm.allocate(sizeof(marrow::Status), marrow::Memory::host);
  auto device = comm.device_communicator({.contexts = 1, .signals = 1});

  auto* send = static_cast<int*>(out.host());
  for (int i = 0; i < kRanks * kColumns; ++i) send[i] = rank * 1000000 + i;
  auto* status = static_cast<marrow::Status*>(result.host());
  marrow::launch(comm.place(), 1, gpu ? 256 : 2, 0, all_to_all, device.handle(), out.handle(),
                 in.handle(), status);
  comm.synchronize();
  comm.check();

  int wrong = *status != marrow::Status::ok;
  const auto* received = static_cast<const int*>(in.host());
  for (int from = 0; from < kRanks; ++from) {
    for (int c = 0; c < kColumns; ++c)
      wrong += received[from * kColumns + c] != from * 1000000 + rank * kColumns + c;
  }
  std::printf("rank %d: %s, %d wrong\n", rank, name(*status), wrong);
  if (wrong) std::exit(1);
  comm.close();
}

int main(int argc, char** argv) {
  const bool gpu = argc > 1 && std::strcmp(argv[1], "--gpu") == 0;
  const marrow::UniqueId id = marrow::UniqueId::create();
  std::vector<std::thread> ranks;
  for (int r = 0; r < kRanks; ++r) ranks.emplace_back(run, id, r, gpu);
  for (auto& rank : ranks) rank.join();
}
