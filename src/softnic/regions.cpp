// SPDX-License-Identifier: Apache-2.0
#include "softnic/regions.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "base/log.hpp"
#include "marrow/error.hpp"

namespace marrow::softnic {
namespace {

constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kRelease = std::memory_order_release;

}  // namespace

Regions::Regions(Directory& directory) : directory_(directory), entries_(kMaxRegions) {}
Regions::~Regions() = default;

int Regions::expose(std::byte* base, std::uint64_t bytes, int fd, std::uint64_t offset) {
  struct stat status {};
  if (bytes == 0) return EINVAL;
  if (::fstat(fd, &status) != 0) return errno;
  if (offset > static_cast<std::uint64_t>(status.st_size) ||
      bytes > static_cast<std::uint64_t>(status.st_size) - offset) {
    return EINVAL;  // touching pages behind the end of a file is a fatal signal
  }
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (reinterpret_cast<std::uint64_t>(base) % page != offset % page) return EINVAL;
  auto exposure = std::make_shared<Exposure>();
  exposure->bytes = bytes;
  exposure->offset = offset;
  exposure->device = status.st_dev;
  exposure->inode = status.st_ino;
  exposure->fd = base::Fd::dup_of(fd);
  exposures_[base] = std::move(exposure);
  return 0;
}

int Regions::withdraw(std::byte* base) { return exposures_.erase(base) == 1 ? 0 : ENOENT; }

std::uint32_t Regions::add(std::byte* base, std::uint64_t length, std::uint64_t iova,
                           std::uint32_t access, std::uint32_t pd) {
  std::uint32_t key = 0;
  RegionSlot* slot = directory_.claim_region(key);
  if (slot == nullptr) return 0;
  auto entry = std::make_unique<Entry>();
  entry->key = key;
  entry->process = directory_.self();
  entry->access = access;
  entry->pd = pd;
  entry->iova = iova;
  entry->length = length;
  entry->base = base;
  slot->access.store(access, kRelaxed);
  slot->pd.store(pd, kRelaxed);
  slot->iova.store(iova, kRelaxed);
  slot->length.store(length, kRelaxed);
  slot->fd.store(-1, kRelaxed);
  auto after = exposures_.upper_bound(base);
  if (after != exposures_.begin()) {
    const auto& [start, exposure] = *std::prev(after);
    const auto inside = static_cast<std::uint64_t>(base - start);
    if (inside <= exposure->bytes && length <= exposure->bytes - inside) {
      slot->device.store(exposure->device, kRelaxed);
      slot->inode.store(exposure->inode, kRelaxed);
      slot->offset.store(exposure->offset + inside, kRelaxed);
      slot->fd.store(exposure->fd.get(), kRelaxed);
      entry->exposure = exposure;
    }
  }
  entries_[key >> 8] = std::move(entry);
  slot->key.store(key, kRelease);
  return key;
}

void Regions::remove(std::uint32_t key) {
  RegionSlot* slot = directory_.region_slot(key);
  if (slot == nullptr || slot->key.load(kAcquire) != key) return;
  slot->key.store(0, kRelease);
  entries_[key >> 8].reset();
}

bool Regions::current(const Entry& entry) const {
  const RegionSlot* slot = directory_.region_slot(entry.key);
  return slot != nullptr && slot->key.load(kAcquire) == entry.key;
}

const Region* Regions::local(std::uint32_t key) const {
  if (directory_.region_slot(key) == nullptr) return nullptr;
  const Entry* entry = entries_[key >> 8].get();
  return entry != nullptr && entry->key == key && entry->process == directory_.self() ? entry
                                                                                      : nullptr;
}

const Region* Regions::remote(std::uint32_t key) {
  RegionSlot* slot = directory_.region_slot(key);
  if (slot == nullptr || slot->key.load(kAcquire) != key) return nullptr;
  const Entry* entry = entries_[key >> 8].get();
  if (entry != nullptr && entry->key == key) return entry;
  return map_remote(key, *slot);
}

const Region* Regions::map_remote(std::uint32_t key, RegionSlot& slot) {
  drop_stale();
  auto entry = std::make_unique<Entry>();
  entry->key = key;
  entry->process = slot.process.load(kAcquire);
  entry->access = slot.access.load(kAcquire);
  entry->pd = slot.pd.load(kAcquire);
  entry->iova = slot.iova.load(kAcquire);
  entry->length = slot.length.load(kAcquire);
  const int number = slot.fd.load(kAcquire);
  const std::uint64_t offset = slot.offset.load(kAcquire);
  const std::uint64_t device = slot.device.load(kAcquire);
  const std::uint64_t inode = slot.inode.load(kAcquire);
  // Acquire loads keep their order: if the name still stands, the fields above belong to it.
  if (slot.key.load(kAcquire) != key || entry->process == directory_.self()) return nullptr;
  if (number < 0) {
    MARROW_WARN(softnic, "key ", key, " names memory of another process that has no descriptor; ",
                "register memory from Communicator::allocate, or shared memory");
    return nullptr;
  }
  const base::Fd fd = directory_.open_descriptor_of(entry->process, number);
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || status.st_dev != device || status.st_ino != inode ||
      offset + entry->length > static_cast<std::uint64_t>(status.st_size)) {
    MARROW_INFO(softnic, "key ", key, ": the memory of process slot ", entry->process,
                " cannot be opened; the process is gone or forbids it");
    return nullptr;
  }
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  const std::uint64_t start = offset / page * page;
  try {
    entry->mapping = base::Mapping::of_fd(fd.get(), offset - start + entry->length, start);
  } catch (const Error& error) {
    MARROW_WARN(softnic, "key ", key, ": ", error.what());
    return nullptr;
  }
  entry->base = entry->mapping.as<std::byte>(offset - start);
  entries_[key >> 8] = std::move(entry);
  return entries_[key >> 8].get();
}

void Regions::drop_stale() {
  for (auto& entry : entries_) {
    if (entry && entry->process != directory_.self() && !current(*entry)) entry.reset();
  }
}

}  // namespace marrow::softnic
