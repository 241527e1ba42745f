// SPDX-License-Identifier: Apache-2.0
// Bytes as a sequence of firmware commands on one open device with one umem and one UAR. Each command
// is {kind, length, bytes}. Whatever they say: no crash, and everything made can be destroyed.
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "marrow/abi/mlx5_prm.h"
#include "verbs/table.hpp"

namespace {

namespace mlx5 = marrow::mlx5;
using marrow::verbs::Table;

struct Device {
  Device() {
    int count = 0;
    marrow::verbs::ibv_device** list = nic.get_device_list(&count);
    context = nic.open_device_in_job(list[0], ("fuzz-" + std::to_string(::getpid())).c_str(), "");
    nic.free_device_list(list);
    if (context == nullptr) std::abort();
    pd = nic.alloc_pd(context);
    memory = std::aligned_alloc(4096, 1 << 16);
    umem = nic.devx_umem_reg(context, memory, 1 << 16, 1);
    uar = nic.devx_alloc_uar(context, 0);
  }
  ~Device() {
    nic.close_device(context);
    std::free(memory);
  }
  const Table& nic = marrow::verbs::provider("softnic");
  marrow::verbs::ibv_context* context;
  marrow::verbs::ibv_pd* pd;
  void* memory;
  marrow::verbs::mlx5dv_devx_umem* umem;
  marrow::verbs::mlx5dv_devx_uar* uar;
};

/// Numbers a command needs are not guessable: filled in unless the first byte says otherwise.
void fill(const Device& d, std::vector<std::uint8_t>& in, std::uint32_t cqn) {
  if (in.size() < mlx5::create_qp::kInBytes) return;
  if (mlx5::get(in.data(), mlx5::command::opcode) == mlx5::kCreateCq) {
    std::uint8_t* c = in.data() + mlx5::create_cq::kContext;
    mlx5::set(c, mlx5::cqc::eqn, 4);
    mlx5::set(c, mlx5::cqc::uar_page, d.uar->page_id);
    mlx5::set(c, mlx5::cqc::record_umem_id, d.umem->umem_id);
    mlx5::set(in.data(), mlx5::create_cq::cq_umem_id, d.umem->umem_id);
  } else {
    std::uint8_t* c = in.data() + mlx5::create_qp::kContext;
    mlx5::set(c, mlx5::qpc::pd, d.pd->handle);
    mlx5::set(c, mlx5::qpc::uar_page, d.uar->page_id);
    mlx5::set(c, mlx5::qpc::record_umem_id, d.umem->umem_id);
    mlx5::set(c, mlx5::qpc::cqn_send, cqn);
    mlx5::set(c, mlx5::qpc::cqn_receive, cqn);
    mlx5::set(in.data(), mlx5::create_qp::wq_umem_id, d.umem->umem_id);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Device device;
  const Table& nic = device.nic;
  std::vector<marrow::verbs::mlx5dv_devx_obj*> objects;
  std::uint32_t cqn = 0;
  while (size >= 3) {
    const std::uint8_t kind = data[0];
    const std::size_t length = std::min<std::size_t>(size - 3, data[1] * 2u);
    std::vector<std::uint8_t> in(data + 3, data + 3 + length);
    std::vector<std::uint8_t> out(data[2] * 2u);
    data += 3 + length;
    size -= 3 + length;
    in.resize(std::max(in.size(), std::size_t{kind & 0x40u ? 0u : 0x110u}));
    if (kind & 0x80) fill(device, in, cqn);
    if (kind % 4 == 0) {
      if (auto* made =
              nic.devx_obj_create(device.context, in.data(), in.size(), out.data(), out.size())) {
        objects.push_back(made);
        if (mlx5::get(in.data(), mlx5::command::opcode) == mlx5::kCreateCq) {
          cqn = static_cast<std::uint32_t>(mlx5::get(out.data(), mlx5::reply::object));
        }
      }
    } else if (kind % 4 == 1 && !objects.empty()) {
      nic.devx_obj_modify(objects.back(), in.data(), in.size(), out.data(), out.size());
    } else if (kind % 4 == 2 && !objects.empty()) {
      nic.devx_obj_query(objects.back(), in.data(), in.size(), out.data(), out.size());
    } else {
      nic.devx_general_cmd(device.context, in.data(), in.size(), out.data(), out.size());
    }
  }
  // Queue pairs were made after the completion queues they use.
  for (auto it = objects.rbegin(); it != objects.rend(); ++it) {
    if (nic.devx_obj_destroy(*it) != 0) std::abort();
  }
  return 0;
}
