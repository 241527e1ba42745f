// SPDX-License-Identifier: Apache-2.0
// Bytes as a WQE: the decoder must neither read past the WQE's segments nor hand out more than it was
// given. The first byte chooses ds where the bytes leave it 0.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "softnic/decode.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  namespace softnic = marrow::softnic;
  if (size < marrow::mlx5::kSegmentBytes) return 0;
  softnic::Control control = softnic::decode_control(data);
  const std::size_t segments = size / marrow::mlx5::kSegmentBytes;
  if (control.ds == 0 || control.ds > segments) {
    control.ds = static_cast<std::uint32_t>(
        segments > marrow::mlx5::kMaxSegments ? marrow::mlx5::kMaxSegments : segments);
  }
  const std::vector<std::uint8_t> wqe(data, data + control.ds * marrow::mlx5::kSegmentBytes);
  softnic::Operation operation;
  if (softnic::decode(wqe.data(), control, operation) != marrow::mlx5::kNoError) return 0;
  std::uint64_t bytes = 0;
  for (std::uint32_t i = 0; i < operation.sge_count; ++i) bytes += operation.sges[i].bytes;
  if (operation.inline_data != nullptr) {
    volatile std::uint8_t last = 0;
    for (std::uint64_t i = 0; i < operation.bytes; ++i) last = operation.inline_data[i];
    (void)last;
  } else if (bytes != operation.bytes) {
    std::abort();
  }
  return 0;
}
