// SPDX-License-Identifier: Apache-2.0
// Stands for the engine block in builds without nvcc.
#include "softnic/gpu_layout.hpp"

namespace marrow::softnic::gpu {

#if !MARROW_WITH_CUDA
bool has_block() { return false; }
int prepare_block() { return 1; }
int launch_block(const Launch&, void*) { return 1; }
#endif

}  // namespace marrow::softnic::gpu
