// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "proxy/copy_engine.hpp"

namespace marrow::proxy {
/// The copy engine of one GPU. @throws Error(unsupported) without a driver
std::unique_ptr<CopyEngine> create_cuda_copy_engine(int device);
}  // namespace marrow::proxy
