// SPDX-License-Identifier: Apache-2.0
// Loading of libcuda and NVML, and the owners on top of them.
#include "cuda/driver.hpp"

#include <dlfcn.h>

#include "base/log.hpp"
#include "base/text.hpp"
#include "marrow/error.hpp"

namespace marrow::cuda {
namespace {

struct Loaded {
  Driver table;
  std::string missing;  // empty: usable
  std::string next_step;
  int devices = 0;
};

// Never unloaded: the driver does not support it.
const Loaded& loaded() {
  static const Loaded instance = [] {
    Loaded out;
    void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* why = ::dlerror();
      out.missing = base::cat("no CUDA driver: ", why ? why : "libcuda.so.1 did not load", ".");
      out.next_step =
          "install NVIDIA's driver (in a container: start it with GPU access), or use the CPU "
          "device";
      return out;
    }
#define MARROW_CUDA_FIND(member, symbol, arguments)                                          \
  out.table.member = reinterpret_cast<decltype(out.table.member)>(::dlsym(library, symbol)); \
  if (out.table.member == nullptr && out.missing.empty()) {                                  \
    out.missing = base::cat("the CUDA driver lacks ", symbol, ".");                          \
    out.next_step = "install a driver for CUDA 12.4 or newer";                               \
  }
    MARROW_CUDA_DRIVER_FUNCTIONS(MARROW_CUDA_FIND)
#undef MARROW_CUDA_FIND
    if (!out.missing.empty()) return out;
    const Result started = out.table.init(0);
    if (started != Result::success) {
      out.missing = base::cat("the CUDA driver did not start: error ", static_cast<int>(started),
                              started == Result::no_device ? " (no device)" : "", ".");
      out.next_step = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use the CPU device";
      return out;
    }
    int version = 0;
    if (out.table.driver_version(&version) == Result::success && version < 12040) {
      out.missing = base::cat("the CUDA driver is for CUDA ", version / 1000, ".",
                              version % 1000 / 10, ", Marrow needs 12.4.");
      out.next_step = "install a newer driver";
      return out;
    }
    if (out.table.device_count(&out.devices) != Result::success || out.devices < 1) {
      out.missing = "the CUDA driver shows no GPU.";
      out.next_step = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use the CPU device";
    }
    return out;
  }();
  return instance;
}

}  // namespace

const Driver& driver() {
  const Loaded& found = loaded();
  if (!found.missing.empty()) throw Error(Code::unsupported, found.missing, found.next_step);
  return found.table;
}

bool available(std::string* reason) {
  const Loaded& found = loaded();
  if (reason != nullptr) *reason = found.missing;
  return found.missing.empty();
}

const Nvml* nvml() {
  static const Nvml* const instance = []() -> const Nvml* {
    static Nvml table;
    void* library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return nullptr;
    bool whole = true;
#define MARROW_NVML_FIND(member, symbol, arguments)                                  \
  table.member = reinterpret_cast<decltype(table.member)>(::dlsym(library, symbol)); \
  whole = whole && table.member != nullptr;
    MARROW_NVML_FUNCTIONS(MARROW_NVML_FIND)
#undef MARROW_NVML_FIND
    return whole && table.init() == 0 ? &table : nullptr;
  }();
  return instance;
}

std::string text(Result result) {
  const char* name = nullptr;
  const char* sentence = nullptr;
  const Driver& table = loaded().table;
  if (table.error_name != nullptr) {
    (void)table.error_name(result, &name);
    (void)table.error_string(result, &sentence);
  }
  if (name == nullptr) return base::cat("CUDA error ", static_cast<int>(result));
  return base::cat(name, ": ", sentence ? sentence : "");
}

void check(Result result, const std::string& what, const std::string& next_step) {
  if (result == Result::success) return;
  const bool memory = result == Result::out_of_memory;
  throw Error(memory ? Code::out_of_memory : Code::cuda,
              base::cat(what, " failed: ", text(result), "."),
              next_step.empty() && memory
                  ? "free GPU memory or ask for less (nvidia-smi shows who holds it)"
                  : next_step);
}

void check_quietly(Result result, const char* what) noexcept {
  if (result == Result::success || result == Result::deinitialized) return;
  try {
    MARROW_WARN(cuda, what, " failed: ", text(result));
  } catch (...) {  // a log line may be lost, teardown goes on
  }
}

int device_count() { return available() ? loaded().devices : 0; }

std::shared_ptr<Context> Context::of(int device) {
  const Driver& cu = driver();
  if (device < 0 || device >= loaded().devices) {
    throw Error(
        Code::invalid_argument,
        base::cat("GPU ", device, " does not exist: this process sees ", loaded().devices, "."),
        "choose a smaller device number or change CUDA_VISIBLE_DEVICES");
  }
  ContextHandle handle = nullptr;
  check(cu.context_retain(&handle, device),
        base::cat("retaining the primary context of GPU ", device),
        "look at nvidia-smi: another process may hold the GPU in exclusive mode");
  return std::shared_ptr<Context>(new Context(device, handle));
}

Context::~Context() {
  check_quietly(driver().context_release(device_), "releasing a primary context");
}

Current::Current(const Context& context) {
  check(driver().context_push(context.handle()),
        base::cat("making GPU ", context.device(), " current"));
}

Current::~Current() {
  ContextHandle popped = nullptr;
  check_quietly(driver().context_pop(&popped), "restoring the current context");
}

Stream::Stream(std::shared_ptr<Context> context, int priority) : context_(std::move(context)) {
  const Current current(*context_);
  check(driver().stream_create_with_priority(&handle_, kStreamNonBlocking, priority),
        base::cat("creating a stream on GPU ", context_->device()));
}

Stream::~Stream() {
  try {
    const Current current(*context_);
    check_quietly(driver().stream_destroy(handle_), "destroying a stream");
  } catch (const Error&) {  // the driver has shut down: nothing is left to free
  }
}

void Stream::synchronize() const {
  const Current current(*context_);
  check(driver().stream_synchronize(handle_),
        base::cat("work on a stream of GPU ", context_->device()),
        "an earlier kernel may have failed: run with compute-sanitizer");
}

Event::Event(std::shared_ptr<Context> context) : context_(std::move(context)) {
  const Current current(*context_);
  check(driver().event_create(&handle_, kEventDisableTiming),
        base::cat("creating an event on GPU ", context_->device()));
}

Event::Event(Event&& other) noexcept
    : context_(std::move(other.context_)), handle_(std::exchange(other.handle_, nullptr)) {}

Event::~Event() {
  if (handle_ == nullptr) return;
  try {
    const Current current(*context_);
    check_quietly(driver().event_destroy(handle_), "destroying an event");
  } catch (const Error&) {
  }
}

void Event::record(const Stream& stream) {
  const Current current(*context_);
  check(driver().event_record(handle_, stream.handle()),
        base::cat("recording an event on GPU ", context_->device()));
}

bool Event::done() const {
  const Result result = driver().event_query(handle_);
  if (result == Result::not_ready) return false;
  check(result, base::cat("work before an event of GPU ", context_->device()));
  return true;
}

}  // namespace marrow::cuda
