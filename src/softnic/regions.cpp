// SPDX-License-Identifier: Apache-2.0
#include "softnic/regions.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/log.hpp"
#include "cuda/mappings.hpp"
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
  auto exposure = std::make_shared<Exposure>();
  exposure->gpu_memory = gpu_memory_ && !S_ISREG(status.st_mode);
  if (!exposure->gpu_memory) {
    if (offset > static_cast<std::uint64_t>(status.st_size) ||
        bytes > static_cast<std::uint64_t>(status.st_size) - offset) {
      return EINVAL;  // touching pages behind the end of a file is a fatal signal
    }
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    if (reinterpret_cast<std::uint64_t>(base) % page != offset % page) return EINVAL;
  }
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
  slot->kind.store(RegionSlot::kFile, kRelaxed);
  entry->gpu_memory = gpu_memory_ && cuda::is_gpu_memory(base) ? 1 : 0;
  auto after = exposures_.upper_bound(base);
  if (after != exposures_.begin()) {
    const auto& [start, exposure] = *std::prev(after);
    const auto inside = static_cast<std::uint64_t>(base - start);
    if (inside <= exposure->bytes && length <= exposure->bytes - inside) {
      slot->device.store(exposure->device, kRelaxed);
      slot->inode.store(exposure->inode, kRelaxed);
      slot->offset.store(exposure->offset + inside, kRelaxed);
      slot->fd.store(exposure->fd.get(), kRelaxed);
      if (exposure->gpu_memory) slot->kind.store(RegionSlot::kGpuMemory, kRelaxed);
      entry->exposure = exposure;
    }
  }
  if (entry->gpu_memory != 0 && !entry->exposure) describe_gpu_memory(*slot, base);
  const Region& region = *entry;
  entries_[key >> 8] = std::move(entry);
  for (Watcher* watcher : watchers_) watcher->entered(region);
  slot->key.store(key, kRelease);
  return key;
}

/// Memory of cudaMalloc has no descriptor; its IPC handle names it to other processes. What has neither stays
/// within this process.
void Regions::describe_gpu_memory(RegionSlot& slot, const std::byte* base) {
  cuda::IpcHandle handle;
  std::uint64_t offset = 0;
  if (!cuda::ipc_handle_of(base, handle, offset)) return;
  std::uint64_t words[8];
  static_assert(sizeof words == sizeof handle);
  std::memcpy(words, &handle, sizeof words);
  for (int i = 0; i < 8; ++i) slot.ipc[i].store(words[i], kRelaxed);
  slot.offset.store(offset, kRelaxed);
  slot.kind.store(RegionSlot::kGpuIpc, kRelaxed);
}

void Regions::watch(Watcher& watcher) {
  watchers_.push_back(&watcher);
  for (const auto& entry : entries_) {
    if (entry && entry->process == directory_.self()) watcher.entered(*entry);
  }
}

void Regions::unwatch(Watcher& watcher) { std::erase(watchers_, &watcher); }

int Regions::descriptor(std::uint32_t key) const {
  if (local(key) == nullptr) return -1;
  const Entry& entry = *entries_[key >> 8];
  return entry.exposure && entry.exposure->gpu_memory ? entry.exposure->fd.get() : -1;
}

void Regions::remove(std::uint32_t key) {
  RegionSlot* slot = directory_.region_slot(key);
  if (slot == nullptr || slot->key.load(kAcquire) != key) return;
  for (Watcher* watcher : watchers_) watcher->revoked(key);
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

bool Regions::only_owner_reaches(std::uint32_t key) const {
  const RegionSlot* slot = directory_.region_slot(key);
  return slot != nullptr && slot->key.load(kAcquire) == key &&
         slot->kind.load(kAcquire) == RegionSlot::kFile && slot->fd.load(kAcquire) < 0 &&
         slot->process.load(kAcquire) != directory_.self();
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
  // Acquire loads keep their order: if the name still stands, the fields above belong to it.
  if (slot.key.load(kAcquire) != key || entry->process == directory_.self()) return nullptr;
  if (slot.kind.load(kRelaxed) != RegionSlot::kFile) {
    MARROW_WARN(softnic, "key ", key,
                " names GPU memory of another process, which the CPU engine "
                "cannot reach; use MARROW_SOFTNIC=engine=gpu on every rank");
    return nullptr;
  }
  if (number < 0) {
    MARROW_WARN(softnic, "key ", key, " names memory of another process that has no descriptor; ",
                "register memory from Communicator::allocate, or shared memory");
    return nullptr;
  }
  std::uint64_t start = 0;
  try {
    entry->mapping = map_file(entry->process, number, slot, start);
  } catch (const Error& error) {
    MARROW_WARN(softnic, "key ", key, ": ", error.what());
    return nullptr;
  }
  if (!entry->mapping.valid()) return nullptr;
  entry->base = entry->mapping.as<std::byte>(offset - start);
  entries_[key >> 8] = std::move(entry);
  return entries_[key >> 8].get();
}

base::Mapping Regions::map_file(std::uint32_t process, int number, const RegionSlot& slot,
                                std::uint64_t& start) const {
  const std::uint64_t offset = slot.offset.load(kRelaxed);
  const std::uint64_t length = slot.length.load(kRelaxed);
  const base::Fd fd = directory_.open_descriptor_of(process, number);
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || status.st_dev != slot.device.load(kRelaxed) ||
      status.st_ino != slot.inode.load(kRelaxed) ||
      offset + length > static_cast<std::uint64_t>(status.st_size)) {
    MARROW_INFO(softnic, "key ", slot.key.load(kRelaxed), ": the memory of process slot ", process,
                " cannot be opened; the process is gone or forbids it");
    return {};
  }
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  start = offset / page * page;
  return base::Mapping::of_fd(fd.get(), offset - start + length, start);
}

void Regions::drop_stale() {
  for (auto& entry : entries_) {
    if (entry && entry->process != directory_.self() && !current(*entry)) entry.reset();
  }
}

}  // namespace marrow::softnic
