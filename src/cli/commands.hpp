// SPDX-License-Identifier: Apache-2.0
// One function a command. Each returns the exit code: 0 ok, 1 a check failed or the machine lacks something (doctor); what is thrown becomes 2, or 1
// when it happened between ranks.
#pragma once

#include <map>
#include <string>

#include "cli/options.hpp"

namespace marrow::cli {

int run_demo(const DemoOptions& options);
int run_perf(const PerfOptions& options);
int run_ep(const EpOptions& options);
int run_info(const InfoOptions& options);
int run_env(const EnvOptions& options);
int run_errors(const ErrorsOptions& options);
int run_doctor(const DoctorOptions& options);

/// Settings of one communicator for --path and --network: the network's name goes to MARROW_NIC on the gda
/// path, else to MARROW_NETWORK.
std::map<std::string, std::string> path_parameters(const std::string& path,
                                                   const std::string& network);

}  // namespace marrow::cli
