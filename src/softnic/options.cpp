// SPDX-License-Identifier: Apache-2.0
#include "softnic/options.hpp"

#include <charconv>

#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::softnic {
namespace {

constexpr const char* kKeys =
    "engine=auto|cpu|gpu|copy, seed, job, start_index, port=ib|roce, atomics=hca|real, delay (us), "
    "reorder=0|1, "
    "drop, "
    "corrupt, error_at, "
    "stall=N[:ms], retry (ms)";

std::uint64_t number(std::string_view key, std::string_view value, std::uint64_t maximum) {
  int base = 10;
  std::string_view digits = value;
  if (digits.starts_with("0x")) {
    digits.remove_prefix(2);
    base = 16;
  }
  std::uint64_t result = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), result, base);
  if (error != std::errc() || end != digits.data() + digits.size() || result > maximum) {
    throw Error(
        Code::invalid_argument,
        base::cat("softnic option ", key, "=", value, " is not a number from 0 to ", maximum, "."),
        "correct MARROW_SOFTNIC");
  }
  return result;
}

void apply(Options& o, std::string_view key, std::string_view value) {
  constexpr std::uint64_t any = ~0ull;
  if (key == "engine" && (value == "auto" || value == "cpu" || value == "gpu" || value == "copy")) {
    o.engine = value == "cpu"    ? EngineChoice::cpu
               : value == "gpu"  ? EngineChoice::gpu
               : value == "copy" ? EngineChoice::copy
                                 : EngineChoice::automatic;
  } else if (key == "seed") {
    o.seed = number(key, value, any);
  } else if (key == "job") {
    o.job = value;
  } else if (key == "start_index") {
    o.start_index = static_cast<std::uint16_t>(number(key, value, 0xffff));
  } else if (key == "port" && (value == "ib" || value == "roce")) {
    o.roce = value == "roce";
  } else if (key == "atomics" && (value == "hca" || value == "real")) {
    o.hca_atomics = value == "hca";
  } else if (key == "delay") {
    o.delay = std::chrono::microseconds(number(key, value, 10'000'000));
  } else if (key == "reorder") {
    o.reorder = number(key, value, 1) != 0;
  } else if (key == "drop") {
    o.drop = number(key, value, any);
  } else if (key == "corrupt") {
    o.corrupt = number(key, value, any);
  } else if (key == "error_at") {
    o.error_at = number(key, value, any);
  } else if (key == "stall") {
    const auto colon = value.find(':');
    o.stall = number(key, value.substr(0, colon), any);
    if (colon != std::string_view::npos) {
      o.stall_time = std::chrono::milliseconds(number(key, value.substr(colon + 1), 3'600'000));
    }
  } else if (key == "retry") {
    o.retry = std::chrono::milliseconds(number(key, value, 3'600'000));
  } else {
    throw Error(Code::invalid_argument, base::cat("softnic has no option '", key, "=", value, "'."),
                base::cat("set MARROW_SOFTNIC to key=value pairs of: ", kKeys));
  }
}

}  // namespace

Options parse_options(std::string_view text) {
  Options options;
  while (!text.empty()) {
    const auto comma = text.find(',');
    const std::string_view item = text.substr(0, comma);
    text.remove_prefix(comma == std::string_view::npos ? text.size() : comma + 1);
    if (item.empty()) continue;
    const auto equals = item.find('=');
    if (equals == std::string_view::npos) {
      apply(options, item, "");
    } else {
      apply(options, item.substr(0, equals), item.substr(equals + 1));
    }
  }
  return options;
}

}  // namespace marrow::softnic
