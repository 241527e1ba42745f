// SPDX-License-Identifier: Apache-2.0
// Plain loads and stores between ranks that share memory (NVLink, or one host's CPU device), ordered
// by a barrier: each rank writes its square into everybody's table, all meet, each adds the table up.
#include <cstdio>
#include <cstring>
#include <marrow/device.cuh>
#include <marrow/marrow.hpp>
#include <thread>
#include <vector>

constexpr int kRanks = 3;

MARROW_KERNEL squares(marrow::DeviceCommunicator comm, marrow::WindowHandle table,
                      std::uint64_t* sum, marrow::Status* status) {
  const marrow::Lsa lsa(comm);
  const marrow::Barrier barrier(comm, team_lsa(comm), /*slot=*/0);
  const marrow::Block block;
  for (int peer = block.rank(); peer < comm.lsa_size; peer += block.size()) {
    const int rank = team_lsa(comm).world_rank(peer);
    *lsa.pointer<std::uint64_t>(table, comm.rank * 8, rank) = std::uint64_t(comm.rank) * comm.rank;
  }
  const marrow::Status met = barrier.sync(block);  // everybody's stores are visible after it
  if (marrow::thread_index() != 0) return;
  *sum = 0;
  for (int r = 0; r < comm.nranks; ++r)
    *sum += *lsa.pointer<std::uint64_t>(table, r * 8, comm.rank);
  *status = met;
}

void run(const marrow::UniqueId& id, int rank, bool gpu) {
  marrow::Config config;
  if (gpu) config.place = marrow::Place::gpu(rank);
  marrow::Communicator comm(id, kRanks, rank, config);
  marrow::Window table = comm.allocate(kRanks * 8);
  marrow::Window result = comm.allocate(16, marrow::Memory::host);
  auto device = comm.device_communicator({.contexts = 1, .barriers = 1});
  auto* sum = static_cast<std::uint64_t*>(result.host());
  auto* status = reinterpret_cast<marrow::Status*>(sum + 1);
  marrow::launch(comm.place(), 1, 2, 0, squares, device.handle(), table.handle(), sum, status);
  comm.synchronize();
  comm.check();
  std::printf("rank %d: %s, sum of squares %llu\n", rank, name(*status),
              static_cast<unsigned long long>(*sum));
  if (*status != marrow::Status::ok || *sum != 0 + 1 + 4) std::exit(1);
  comm.close();
}

int main(int argc, char** argv) {
  const bool gpu = argc > 1 && std::strcmp(argv[1], "--gpu") == 0;
  const marrow::UniqueId id = marrow::UniqueId::create();
  std::vector<std::thread> ranks;
  for (int r = 0; r < kRanks; ++r) ranks.emplace_back(run, id, r, gpu);
  for (auto& rank : ranks) rank.join();
}
