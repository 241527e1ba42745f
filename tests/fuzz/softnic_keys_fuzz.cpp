// SPDX-License-Identifier: Apache-2.0
// Bytes as a sequence of registrations, removals and uses of keys, against a plain table of what is
// registered: a key that was never given out or was taken back names nothing, a live one names exactly
// its region, and a range is granted exactly when it lies in it. Directory, slots and Region::at are
// the ones that every engine asks.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "softnic/regions.hpp"

namespace {

using marrow::softnic::Directory;
using marrow::softnic::Region;
using marrow::softnic::Regions;

struct Known {
  std::byte* base;
  std::uint64_t length, iova;
  std::uint32_t access, pd;
};

void require(bool truth) {
  if (!truth) std::abort();
}

class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), left_(size) {}
  bool empty() const { return left_ == 0; }
  template <class T>
  T take() {
    T value{};
    const std::size_t bytes = left_ < sizeof value ? left_ : sizeof value;
    std::memcpy(&value, data_, bytes);
    data_ += bytes;
    left_ -= bytes;
    return value;
  }

 private:
  const std::uint8_t* data_;
  std::size_t left_;
};

/// Whether [address, address + bytes) lies in [iova, iova + length), without a sum that could wrap.
bool inside(const Known& region, std::uint64_t address, std::uint64_t bytes) {
  const unsigned __int128 first = address, end = first + bytes;
  const unsigned __int128 start = region.iova, stop = start + region.length;
  // An address space that wraps at 2^64 holds what lies behind the wrap, too.
  const unsigned __int128 lap = static_cast<unsigned __int128>(1) << 64;
  return (first >= start && end <= stop) || (first + lap >= start && end + lap <= stop);
}

void use(Regions& regions, const std::map<std::uint32_t, Known>& known, std::uint32_t key,
         std::uint64_t address, std::uint64_t bytes) {
  const auto found = known.find(key);
  for (const Region* region : {regions.local(key), regions.remote(key)}) {
    require((region != nullptr) == (found != known.end()));
    if (region == nullptr) continue;
    const Known& want = found->second;
    require(region->key == key && region->access == want.access && region->pd == want.pd);
    const std::byte* at = region->at(address, bytes);
    require((at != nullptr) == inside(want, address, bytes));
    if (at == nullptr) continue;
    const auto offset = static_cast<std::uint64_t>(at - want.base);
    require(offset == address - want.iova && offset <= want.length &&
            bytes <= want.length - offset);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Directory directory("fuzz-keys-" + std::to_string(::getpid()));
  static std::vector<std::byte> memory(1 << 16);
  static Regions regions(directory);  // its table is large; every run leaves it empty
  std::map<std::uint32_t, Known> known;
  std::vector<std::uint32_t> keys;  // in the order in which they were given out, taken back or not
  Input in(data, size);
  while (!in.empty() && keys.size() < 64) {
    const auto what = in.take<std::uint8_t>();
    const std::uint32_t named = keys.empty() ? 0 : keys[in.take<std::uint8_t>() % keys.size()];
    switch (what % 4) {
      case 0: {
        Known region{};
        region.base = memory.data() + in.take<std::uint16_t>() % memory.size();
        region.length = in.take<std::uint16_t>() %
                        (memory.size() - static_cast<std::size_t>(region.base - memory.data()) + 1);
        region.iova =
            what & 0x80 ? reinterpret_cast<std::uintptr_t>(region.base) : in.take<std::uint64_t>();
        region.access = in.take<std::uint8_t>();
        region.pd = in.take<std::uint8_t>();
        const std::uint32_t key =
            regions.add(region.base, region.length, region.iova, region.access, region.pd);
        require(key != 0 && !known.contains(key));
        known[key] = region;
        keys.push_back(key);
        break;
      }
      case 1:
        regions.remove(named);
        known.erase(named);
        break;
      case 2:  // close to a key that exists or existed
        use(regions, known, named ^ (what & 0x40 ? 1u << (what >> 2 & 15) : 0u),
            in.take<std::uint64_t>(), in.take<std::uint64_t>());
        break;
      default: {
        const auto found = known.find(named);
        const std::uint64_t start = found == known.end() ? 0 : found->second.iova;
        const auto from = static_cast<std::int64_t>(in.take<std::int16_t>());
        use(regions, known, what & 0x40 ? in.take<std::uint32_t>() : named,
            start + static_cast<std::uint64_t>(from), in.take<std::uint16_t>());
      }
    }
  }
  for (const std::uint32_t key : keys) {
    regions.remove(key);
    require(regions.local(key) == nullptr && regions.remote(key) == nullptr);
  }
  return 0;
}
