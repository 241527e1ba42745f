// SPDX-License-Identifier: Apache-2.0
// The device API, whole. Each header of device/ is a contract that reads from end to end; bodies are
// in device/detail.
#pragma once

#include "marrow/device/barrier.cuh"
#include "marrow/device/gin.cuh"
#include "marrow/device/launch.cuh"
#include "marrow/device/lsa.cuh"
#include "marrow/device/multimem.cuh"
