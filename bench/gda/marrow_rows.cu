// SPDX-License-Identifier: Apache-2.0
#include "marrow_kernels.cuh"
#include "probe_kernels.cuh"

namespace gda_bench {
namespace {

template <Sharing kSharing>
void by_placement() {
  issue_row<kSharing, true, What::put>("put 64 B", Placement::device, GdaRelease::device);
  issue_row<kSharing, true, What::put>("put 64 B", Placement::device, GdaRelease::device, 32);
  issue_row<kSharing, true, What::put>("put 64 B", Placement::device, GdaRelease::system);
  issue_row<kSharing, true, What::put>("put 64 B", Placement::host, GdaRelease::system);
  issue_row<kSharing, false, What::put>("put 64 B", Placement::device, GdaRelease::device, 1,
                                        "sharing mode known at run time");
}

template <class Kernel>
void probe_row(const char* what, Kernel kernel) {
  cudaFuncAttributes a{};
  must(cudaFuncGetAttributes(&a, kernel), what);
  int blocks = 0;
  must(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 128, 0), what);
  add_cost({what, a.numRegs, static_cast<int>(a.localSizeBytes), blocks});
}

}  // namespace

void probe_rows() {
  probe_row("exclusive put, bounded to 24 registers", gda_probes::exclusive_put_24);
  probe_row("exclusive put", gda_probes::exclusive_put);
  probe_row("put of a held queue", gda_probes::held_put);
  probe_row("put + signal of a held queue", gda_probes::held_put_signal);
  probe_row("exclusive put_value", gda_probes::exclusive_put_value);
  probe_row("exclusive signal", gda_probes::exclusive_signal);
  probe_row("exclusive put + signal", gda_probes::exclusive_put_signal);
  probe_row("exclusive put, each lane", gda_probes::exclusive_put_each_lane);
  probe_row("block-shared put", gda_probes::block_shared_put);
  probe_row("device-shared put", gda_probes::device_shared_put);
  probe_row("put, sharing mode known at run time", gda_probes::any_sharing_put);
  probe_row("none: a kernel that only links Marrow", gda_probes::unrelated);
}

void marrow_rows() {
  by_placement<Sharing::thread>();
  issue_held_row<false>("put 64 B", Placement::device, GdaRelease::device);
  issue_held_row<false>("put 64 B", Placement::device, GdaRelease::device, 32);
  issue_held_row<false>("put 64 B", Placement::device, GdaRelease::system);
  issue_held_row<false>("put 64 B", Placement::host, GdaRelease::system);
  issue_held_row<true>("put 64 B + signal", Placement::device, GdaRelease::device);
  by_placement<Sharing::block>();
  by_placement<Sharing::device>();
  issue_row<Sharing::thread, true, What::put_value>("put_value 8 B", Placement::device,
                                                    GdaRelease::device);
  issue_row<Sharing::thread, true, What::put_signal>("put 64 B + signal", Placement::device,
                                                     GdaRelease::device);
  issue_row<Sharing::device, true, What::put_signal>("put 64 B + signal", Placement::device,
                                                     GdaRelease::device);
  issue_row<Sharing::thread, true, What::put_each_lane>("put 64 B, each lane", Placement::device,
                                                        GdaRelease::device);
  issue_row<Sharing::device, true, What::put_each_lane>("put 64 B, each lane", Placement::device,
                                                        GdaRelease::device);

  struct Shape {
    int blocks, threads, queues;
  };
  for (const Shape s : {Shape{1, 1, 1},
                        {1, 32, 1},
                        {132, 1, 1},
                        {132, 1, 8},
                        {132, 1, 132},
                        {8, 128, 1},
                        {8, 128, 8},
                        {8, 128, 132},
                        {132, 128, 1},
                        {132, 128, 8},
                        {132, 128, 132}}) {
    rate_row<Sharing::device, What::put>("put 64 B rate", s.blocks, s.threads, s.queues);
  }
  for (const Shape s : {Shape{132, 128, 8}, {132, 128, 132}})
    rate_row<Sharing::device, What::put_each_lane>("put 64 B rate, each lane", s.blocks, s.threads,
                                                   s.queues);
  for (const Shape s : {Shape{1, 1, 1}, {132, 1, 132}})
    rate_row<Sharing::thread, What::put>("put 64 B rate", s.blocks, s.threads, s.queues);
  for (const Shape s : {Shape{1, 32, 1}, {8, 32, 8}, {132, 32, 132}})
    rate_row<Sharing::thread, What::put_each_lane>("put 64 B rate, each lane", s.blocks, s.threads,
                                                   s.queues);
}

}  // namespace gda_bench
