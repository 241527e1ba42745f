// SPDX-License-Identifier: Apache-2.0
// One kernel an operation whose fences ptx_golden_test.cpp counts. Only ever compiled to PTX.
#include "marrow/device.cuh"

using namespace marrow;
using Word = std::uint64_t;

extern "C" {
__global__ void publish_system(Word* a, Word* b) {
  publish<Scope::system>(Store{a, Word{1}}, Store{b, Word{2}});
}
__global__ void publish_device(Word* a) { publish<Scope::device>(Store{a, Word{1}}); }
__global__ void publish_block(Word* a) { publish<Scope::block>(Store{a, Word{1}}); }
__global__ void publication(Word* a, std::uint32_t* b) {
  Publication<Scope::system> out;
  out.store(a, 1);
  out.store(b, 2);
  out.add(a + 1, 3);
}
__global__ void add_system(Word* a) { publish_add<Scope::system>(a, 1); }
__global__ void add_device(Word* a) { publish_add<Scope::device>(a, 1); }
__global__ void observe_system(const Word* a, Word* out) { *out = observe<Scope::system>(a); }
__global__ void observe_device(const Word* a, Word* out) { *out = observe<Scope::device>(a); }
__global__ void settled(Word* a) {
  a[0] = 1;
  settle<Scope::system>();
  a[1] = 2;
}
__global__ void cell_store(Cell16* a) { store_cell(a, Cell16{1, 2}); }
__global__ void cell_load(const Cell16* a, Word* out) { *out = load_cell(a).low; }
__global__ void lsa_put_signal(DeviceCommunicator comm, WindowHandle window) {
  const Gin<Path::lsa> gin(comm, 0);
  (void)gin.put(1, window, 0, window, 0, 4096, SignalAdd{3, 1});
}
__global__ void lsa_block_put_signal(DeviceCommunicator comm, WindowHandle window) {
  const Gin<Path::lsa> gin(comm, 0);
  (void)gin.put(1, window, 0, window, 0, 4096, SignalAdd{3, 1}, Block{});
}
__global__ void lsa_signal_released(DeviceCommunicator comm) {
  const Gin<Path::lsa> gin(comm, 0);
  (void)gin.signal(1, SignalAdd{3, 1}, Ordering{Ordering::Released::system});
}
__global__ void lsa_put_released(DeviceCommunicator comm, WindowHandle window) {
  const Gin<Path::lsa> gin(comm, 0);
  (void)gin.put(1, window, 0, window, 0, 4096, SignalAdd{3, 1},
                Ordering{Ordering::Released::system});
}
__global__ void lsa_put(DeviceCommunicator comm, WindowHandle window) {
  const Gin<Path::lsa> gin(comm, 0);
  (void)gin.put(1, window, 0, window, 0, 4096);
}
__global__ void lsa_packet(DeviceCommunicator comm) {
  const Gin<Path::lsa> gin(comm, 0);
  (void)gin.send_packet(1, 0, 7, 1);
}
__global__ void wait_one_signal(DeviceCommunicator comm, Status* out) {
  const Gin<Path::lsa> gin(comm, 0);
  *out = gin.wait_signal(3, 1);
}
__global__ void proxy_put_signal(DeviceCommunicator comm, WindowHandle window) {
  const detail::Then then{&comm.sync[2], 8, 1, true};
  (void)detail::PathProxy::put(comm, 0, {1, window, 0, Region(window), 0, 4096}, then, {});
}
__global__ void proxy_put_released(DeviceCommunicator comm, WindowHandle window) {
  detail::Knobs knobs;
  knobs.ordering.released = Ordering::Released::system;
  (void)detail::PathProxy::put(comm, 0, {1, window, 0, Region(window), 0, 4096}, {}, knobs);
}
__global__ void proxy_value_signal(DeviceCommunicator comm, WindowHandle window, Word value) {
  const detail::Then then{&comm.sync[2], 8, 1, true};
  (void)detail::PathProxy::put_value(comm, 0, 1, window, 0, &value, 8, then, {});
}
__global__ void proxy_value_alone(const MARROW_GRID_CONSTANT DeviceCommunicator comm,
                                  const MARROW_GRID_CONSTANT WindowHandle window, Word value) {
  const Gin<Path::proxy> gin(comm, 0, Sharing::thread);
  (void)gin.put_value(1, window, 0, value);
}
__global__ void proxy_small_put(DeviceCommunicator comm, WindowHandle window) {
  (void)detail::PathProxy::put(comm, 0, {1, window, 0, Region(window), 0, 24}, {}, {});
}
#define GDA_PUT(NAME, SHARING, ...)                                        \
  __global__ void NAME(const MARROW_GRID_CONSTANT DeviceCommunicator comm, \
                       const MARROW_GRID_CONSTANT WindowHandle window) {   \
    const Gin<Path::gda> gin(comm, 0, SHARING);                            \
    (void)gin.put(1, window, 0, window, 0, 64 __VA_OPT__(, ) __VA_ARGS__); \
  }
GDA_PUT(gda_put_thread, Sharing::thread)
GDA_PUT(gda_put_signal_thread, Sharing::thread, SignalAdd{1, 1})
GDA_PUT(gda_put_each_lane, Sharing::thread, EachLane{})
GDA_PUT(gda_put_block, Sharing::block)
GDA_PUT(gda_put_device, Sharing::device)
__global__ void gda_put_loop(const MARROW_GRID_CONSTANT DeviceCommunicator comm,
                             const MARROW_GRID_CONSTANT WindowHandle window, int n) {
  const Gin<Path::gda> gin(comm, 0, Sharing::thread);
  for (int i = 0; i < n; ++i) {
    if (gin.put(1, window, 0, window, 0, 64) != Status::ok) return;
  }
}
}
