// SPDX-License-Identifier: Apache-2.0
// What the two replacement libraries share. Everything else reaches softnic through verbs::Table, as
// the rest of Marrow does.
#pragma once

#include "verbs/table.hpp"

#define MARROW_EXPORT extern "C" __attribute__((visibility("default")))

/// softnic's functions; lives in libibverbs.so.1, so that both libraries speak of one device.
extern "C" const marrow::verbs::Table* marrow_softnic_verbs_table();
