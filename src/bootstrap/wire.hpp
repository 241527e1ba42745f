// SPDX-License-Identifier: Apache-2.0
// Payloads of bootstrap frames: little-endian numbers and length-prefixed bytes. The reader checks
// every length against what is there before it touches or allocates anything.
#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace marrow::bootstrap {

static_assert(std::endian::native == std::endian::little, "the wire format is little-endian");

using Bytes = std::vector<std::byte>;
using RankSet = std::vector<bool>;

/// A payload that does not say what its type promises; the connection it came over is dropped.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Writer {
 public:
  template <std::integral T>
  Writer& number(T value) {
    auto raw = std::as_bytes(std::span(&value, 1));
    out_.insert(out_.end(), raw.begin(), raw.end());
    return *this;
  }
  Writer& raw(std::span<const std::byte> bytes) {
    out_.insert(out_.end(), bytes.begin(), bytes.end());
    return *this;
  }
  Writer& bytes(std::span<const std::byte> bytes) {
    return number(static_cast<std::uint64_t>(bytes.size())).raw(bytes);
  }
  Writer& text(std::string_view text) { return bytes(std::as_bytes(std::span(text))); }
  Writer& ranks(const RankSet& set) {
    number(static_cast<std::uint32_t>(set.size()));
    for (bool in : set) number(static_cast<std::uint8_t>(in));
    return *this;
  }
  std::span<const std::byte> view() const { return out_; }
  Bytes take() { return std::move(out_); }

 private:
  Bytes out_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> in) : in_(in) {}

  template <std::integral T>
  T number() {
    T value;
    auto raw = take(sizeof(T));
    std::memcpy(&value, raw.data(), sizeof(T));
    return value;
  }
  std::span<const std::byte> take(std::size_t size) {
    if (size > in_.size()) throw Malformed("a frame is shorter than its content says");
    auto out = in_.first(size);
    in_ = in_.subspan(size);
    return out;
  }
  std::span<const std::byte> bytes() {
    auto size = number<std::uint64_t>();
    if (size > in_.size()) throw Malformed("a frame is shorter than its content says");
    return take(static_cast<std::size_t>(size));
  }
  std::string text() {
    auto raw = bytes();
    return std::string(reinterpret_cast<const char*>(raw.data()), raw.size());
  }
  RankSet ranks() {
    auto raw = take(number<std::uint32_t>());
    RankSet set(raw.size());
    for (std::size_t i = 0; i < raw.size(); ++i) set[i] = raw[i] != std::byte{0};
    return set;
  }

 private:
  std::span<const std::byte> in_;
};

}  // namespace marrow::bootstrap
