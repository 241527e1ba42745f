// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan
// The libfabric network and device memory that only a copy engine can touch, over tcp and shm. Skipped where
// libfabric is not installed.
#include <sys/mman.h>
#include <unistd.h>

#include <deque>

#include "unit/libfabric_support.hpp"

namespace marrow::test {
namespace {

/// A copy engine that is late, and the only one that can touch "device memory": its users' view of that has no access
/// rights, and the engine's is another mapping. What the provider does there by itself needs a GPU.
class LateCopies {
 public:
  explicit LateCopies(std::size_t bytes) : bytes_(bytes) {
    file_ = ::memfd_create("device", 0);
    EXPECT_EQ(::ftruncate(file_, static_cast<off_t>(bytes)), 0);
    guarded = map(PROT_NONE);
    real = map(PROT_READ | PROT_WRITE);
  }
  ~LateCopies() {
    ::munmap(guarded, bytes_);
    ::munmap(real, bytes_);
    ::close(file_);
  }
  LateCopies(const LateCopies&) = delete;
  LateCopies& operator=(const LateCopies&) = delete;

  void lend(marrow_network_services& services) {
    services.user = this;
    services.copy = [](void* user, void* to, const void* from, std::uint64_t n,
                       std::uint64_t* ticket) {
      auto& self = *static_cast<LateCopies*>(user);
      Copy copy{self.translate(to), self.translate(from), n, {}};
      if (n <= 64) {  // taken before the call returns
        const auto* bytes = static_cast<const std::byte*>(copy.from);
        copy.taken.assign(bytes, bytes + n);
      }
      self.copies_.push_back(std::move(copy));
      *ticket = ++self.started_;
      return static_cast<int>(MARROW_NETWORK_OK);
    };
    services.copy_test = [](void* user, std::uint64_t ticket) {
      auto& self = *static_cast<LateCopies*>(user);
      if (++self.asked_ % 20 == 0 && !self.copies_.empty()) {
        const Copy& copy = self.copies_.front();
        std::memcpy(copy.to, copy.taken.empty() ? copy.from : copy.taken.data(), copy.bytes);
        self.copies_.pop_front();
        ++self.ended_;
      }
      return ticket <= self.ended_ ? 1 : 0;
    };
  }

  std::byte* guarded = nullptr;
  std::byte* real = nullptr;

 private:
  struct Copy {
    void* to;
    const void* from;
    std::uint64_t bytes;
    std::vector<std::byte> taken;
  };
  std::byte* map(int rights) {
    void* at = ::mmap(nullptr, bytes_, rights, MAP_SHARED, file_, 0);
    EXPECT_NE(at, MAP_FAILED);
    return static_cast<std::byte*>(at);
  }
  void* translate(const void* address) {
    auto* at = static_cast<std::byte*>(const_cast<void*>(address));
    return at >= guarded && at < guarded + bytes_ ? real + (at - guarded) : at;
  }

  const std::size_t bytes_;
  int file_ = -1;
  std::deque<Copy> copies_;
  std::uint64_t started_ = 0, ended_ = 0, asked_ = 0;
};

TEST_P(Libfabric, ValuesAndOwnOperationsReachDeviceMemory) {
  constexpr std::size_t kBytes = 1 << 16;
  LateCopies copies(kBytes);
  marrow_network_services services{};
  services.version = MARROW_NETWORK_VERSION;
  services.size = sizeof(services);
  copies.lend(services);
  Sides sides("libfabric", options() + "&device=host", 2, kBytes, services);
  ASSERT_EQ(sides.problem, "");
  marrow_network_properties properties{};
  properties.size = sizeof(properties);
  ASSERT_EQ(sides[1].network->properties(sides[1].instance, 0, &properties), MARROW_NETWORK_OK);
  EXPECT_EQ(properties.device_memory, 1);
  marrow_network_memory what{};
  what.address = copies.guarded;
  what.bytes = kBytes;
  what.device = 1;
  what.fd = -1;
  void* region = nullptr;
  void* remote[2] = {};
  std::uint8_t key[MARROW_NETWORK_MAX_KEY];
  std::uint32_t key_bytes = 0;
  ASSERT_EQ(sides[1].network->register_memory(sides[1].endpoint, &what, &region, key, &key_bytes),
            MARROW_NETWORK_OK)
      << sides[1].error();
  for (std::uint32_t r = 0; r < 2; ++r) {
    ASSERT_EQ(sides[r].network->import_key(sides[r].endpoint, 1, key, key_bytes, &remote[r]),
              MARROW_NETWORK_OK);
  }
  // Values from both ranks: whole, and before their immediates.
  for (std::uint32_t from = 0; from < 2; ++from) {
    for (const std::uint64_t bytes : {1, 8, 23, 24}) {
      auto value = sides.operation(MARROW_NETWORK_PUT_VALUE, from, 1);
      value.remote = remote[from];
      value.remote_offset = 64 * bytes + from;
      value.bytes = bytes;
      value.has_immediate = 1;
      value.immediate = 5;
      std::memset(value.inline_data, static_cast<int>(bytes + from + 1), bytes);
      const std::size_t seen = sides[1].immediates.size();
      EXPECT_EQ(sides.run(from, value), MARROW_NETWORK_OK);
      ASSERT_TRUE(sides.until([&] { return sides[1].immediates.size() == seen + 1; }));
      EXPECT_EQ(std::memcmp(copies.real + value.remote_offset, value.inline_data, bytes), 0)
          << "rank " << from << "'s " << bytes << " bytes";
    }
  }
  // A rank's own puts and gets, from and to either kind of memory.
  for (const bool device_source : {false, true}) {
    for (const bool device_target : {false, true}) {
      for (const std::uint32_t kind : {MARROW_NETWORK_PUT, MARROW_NETWORK_GET}) {
        for (const std::uint64_t bytes : {40, 5000}) {
          const bool put = kind == MARROW_NETWORK_PUT;
          auto o = sides.operation(kind, 1, 1);
          o.bytes = bytes;
          const bool device_local = put ? device_source : device_target;
          const bool device_remote = put ? device_target : device_source;
          if (device_local) o.local = region;
          if (device_remote) o.remote = remote[1];
          const std::uint64_t source_at = 1000, target_at = 20000;
          o.local_offset = put ? source_at : target_at;
          o.remote_offset = put ? target_at : source_at;
          std::byte* host = sides.memory[1].bytes.data();
          std::byte* source = (device_source ? copies.real : host) + source_at;
          std::byte* target = (device_target ? copies.real : host) + target_at;
          for (std::uint64_t i = 0; i < bytes; ++i)
            source[i] = static_cast<std::byte>(i * 3 + o.token);
          std::memset(target, 0, bytes);
          EXPECT_EQ(sides.run(1, o), MARROW_NETWORK_OK);
          EXPECT_EQ(std::memcmp(target, source, bytes), 0)
              << "kind " << kind << (device_source ? " device" : " host") << " to "
              << (device_target ? "device, " : "host, ") << bytes << " bytes";
        }
      }
    }
  }
  for (std::uint32_t r = 0; r < 2; ++r) sides[r].network->release_key(sides[r].endpoint, remote[r]);
  sides[1].network->deregister_memory(sides[1].endpoint, region);
}

TEST_P(Libfabric, WithoutACopyEngineDeviceMemoryIsNotPromised) {
  Sides sides("libfabric", options() + "&device=host");
  ASSERT_EQ(sides.problem, "");
  marrow_network_properties properties{};
  properties.size = sizeof(properties);
  ASSERT_EQ(sides[0].network->properties(sides[0].instance, 0, &properties), MARROW_NETWORK_OK);
  EXPECT_EQ(properties.device_memory, 0);
  marrow_network_memory what{};
  what.address = sides.memory[0].bytes.data();
  what.bytes = 64;
  what.device = 1;
  what.fd = -1;
  void* region = nullptr;
  std::uint8_t key[MARROW_NETWORK_MAX_KEY];
  std::uint32_t key_bytes = 0;
  EXPECT_EQ(sides[0].network->register_memory(sides[0].endpoint, &what, &region, key, &key_bytes),
            MARROW_NETWORK_UNSUPPORTED);
}

INSTANTIATE_TEST_SUITE_P(Providers, Libfabric, ::testing::Values("tcp", "shm"),
                         [](const auto& each) { return std::string(each.param); });

}  // namespace
}  // namespace marrow::test
