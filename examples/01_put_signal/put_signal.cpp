// SPDX-License-Identifier: Apache-2.0
// Two ranks, one message: rank 0 puts a line of text into rank 1's window and signals; rank 1 waits
// and reads it. The ranks are threads here; with mpirun or torchrun use Communicator::from_environment().
#include <cstdio>
#include <cstring>
#include <marrow/device.cuh>
#include <marrow/marrow.hpp>
#include <thread>

constexpr char kText[] = "written by a kernel into another rank's memory";

MARROW_KERNEL send(marrow::DeviceCommunicator comm, marrow::WindowHandle window,
                   marrow::Status* status) {
  const marrow::Gin gin(comm, /*context=*/0);
  // Bytes 0.. of our part of the window go to bytes 256.. of rank 1's; then signal 0 there grows by 1.
  *status = gin.put(1, window, 256, window, 0, sizeof(kText), marrow::SignalAdd{0, 1});
}

MARROW_KERNEL receive(marrow::DeviceCommunicator comm, marrow::Status* status) {
  const marrow::Gin gin(comm, 0);
  *status = gin.wait_signal(0, 1);  // ok: the put that came with it is visible here
}

void run(const marrow::UniqueId& id, int rank, bool gpu) {
  marrow::Config config;
  if (gpu) config.place = marrow::Place::gpu(rank);
  marrow::Communicator comm(id, 2, rank, config);
  marrow::Window window = comm.allocate(4096, marrow::Memory::host);
  marrow::Window result = comm.allocate(sizeof(marrow::Status), marrow::Memory::host);
  auto device = comm.device_communicator({.contexts = 1, .signals = 1});
  auto* status = static_cast<marrow::Status*>(result.data());
  auto* bytes = static_cast<char*>(window.host());
  if (rank == 0) {
    std::memcpy(bytes, kText, sizeof(kText));
    marrow::launch(comm.place(), 1, 1, 0, send, device.handle(), window.handle(), status);
  } else {
    marrow::launch(comm.place(), 1, 1, 0, receive, device.handle(), status);
  }
  comm.synchronize();
  comm.check();
  if (rank == 1) std::printf("rank 1: %s: \"%s\"\n", name(*status), bytes + 256);
  if (*status != marrow::Status::ok || (rank == 1 && std::strcmp(bytes + 256, kText) != 0))
    std::exit(1);
  comm.close();
}

int main(int argc, char** argv) {
  const bool gpu = argc > 1 && std::strcmp(argv[1], "--gpu") == 0;
  const marrow::UniqueId id = marrow::UniqueId::create();
  std::thread other(run, id, 1, gpu);
  run(id, 0, gpu);
  other.join();
}
