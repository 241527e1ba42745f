// SPDX-License-Identifier: Apache-2.0
// marrow-test: asan
// NICs that the gda path cannot use, each for one reason, and commands that they refuse: the sentence names the NIC,
// the reason and what to do, and nothing stays behind. The NIC is softnic behind a table that looks like a real one's.
#include "gda/device.hpp"

#include <gmock/gmock.h>

#include <cerrno>
#include <functional>
#include <vector>

#include "gda/queue_pair.hpp"
#include "marrow/abi/mlx5_prm.h"
#include "marrow/error.hpp"

namespace marrow::gda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using verbs::ibv_context;
using verbs::ibv_device;
using verbs::Table;

/// Set by each case, looked at by the table's functions.
struct Wrong {
  bool no_device = false, not_mlx5 = false, no_open = false, no_pd = false, no_number = false,
       no_events = false, no_commands = false, no_umem = false, no_uar = false;
  std::function<void(std::uint8_t* capability)> capability;
  int refused = 0;  ///< opcode of the command that is refused
  std::uint8_t status = 0;
};
Wrong wrong;
int contexts = 0;  // opened and not closed
int domains = 0;

const Table& soft() { return verbs::provider("softnic"); }

int no(int error) {
  errno = error;
  return -1;
}
/// Whether the command is to be refused; then the reply says how.
bool refuses(const void* in, void* out) {
  const auto opcode =
      static_cast<int>(mlx5::get(static_cast<const std::uint8_t*>(in), mlx5::command::opcode));
  if (wrong.refused == 0 || opcode != wrong.refused) return false;
  mlx5::set(static_cast<std::uint8_t*>(out), mlx5::reply::status, wrong.status);
  mlx5::set(static_cast<std::uint8_t*>(out), mlx5::reply::syndrome, 0xabc);
  errno = EREMOTEIO;
  return true;
}

/// As a real NIC's: nothing of softnic's own in it.
const Table& table() {
  static const Table the_table = [] {
    Table t = soft();
    t.name = "picky";
    t.open_device_in_job = nullptr;
    t.expose_memory = nullptr;
    t.withdraw_memory = nullptr;
    t.accept_gpu = nullptr;
    t.choose_engine = nullptr;
    t.failures = nullptr;
    t.last_error = nullptr;
    t.get_device_list = [](int* count) {
      ibv_device** list = soft().get_device_list(count);
      if (wrong.no_device) *count = 0;
      return list;
    };
    t.is_supported = [](ibv_device* device) {
      return !wrong.not_mlx5 && soft().is_supported(device);
    };
    t.open_device = [](ibv_device* device) -> ibv_context* {
      if (wrong.no_open) return no(EACCES), nullptr;
      ibv_context* context = soft().open_device(device);
      contexts += context != nullptr;
      return context;
    };
    t.close_device = [](ibv_context* context) { return --contexts, soft().close_device(context); };
    t.alloc_pd = [](ibv_context* context) -> verbs::ibv_pd* {
      if (wrong.no_pd) return no(ENOMEM), nullptr;
      verbs::ibv_pd* pd = soft().alloc_pd(context);
      domains += pd != nullptr;
      return pd;
    };
    t.dealloc_pd = [](verbs::ibv_pd* pd) { return --domains, soft().dealloc_pd(pd); };
    t.init_obj = [](verbs::mlx5dv_obj* object, std::uint64_t type) {
      return wrong.no_number ? no(EINVAL) : soft().init_obj(object, type);
    };
    t.devx_query_eqn = [](ibv_context* context, std::uint32_t vector, std::uint32_t* eqn) {
      return wrong.no_events ? no(EINVAL) : soft().devx_query_eqn(context, vector, eqn);
    };
    t.devx_general_cmd = [](ibv_context* context, const void* in, std::size_t in_bytes, void* out,
                            std::size_t out_bytes) {
      if (wrong.no_commands) return no(EPERM);
      const int result = soft().devx_general_cmd(context, in, in_bytes, out, out_bytes);
      if (wrong.capability)
        wrong.capability(static_cast<std::uint8_t*>(out) + mlx5::hca_cap::kCapability);
      return result;
    };
    t.devx_umem_reg = [](ibv_context* context, void* address, std::size_t bytes,
                         std::uint32_t access) -> verbs::mlx5dv_devx_umem* {
      if (wrong.no_umem) return no(ENOMEM), nullptr;
      return soft().devx_umem_reg(context, address, bytes, access);
    };
    t.devx_alloc_uar = [](ibv_context* context, std::uint32_t kind) -> verbs::mlx5dv_devx_uar* {
      if (wrong.no_uar) return no(ENOSPC), nullptr;
      return soft().devx_alloc_uar(context, kind);
    };
    t.devx_obj_create = [](ibv_context* context, const void* in, std::size_t in_bytes, void* out,
                           std::size_t out_bytes) -> verbs::mlx5dv_devx_obj* {
      if (refuses(in, out)) return nullptr;
      return soft().devx_obj_create(context, in, in_bytes, out, out_bytes);
    };
    t.devx_obj_query = [](verbs::mlx5dv_devx_obj* object, const void* in, std::size_t in_bytes,
                          void* out, std::size_t out_bytes) {
      return refuses(in, out) ? -1 : soft().devx_obj_query(object, in, in_bytes, out, out_bytes);
    };
    t.devx_obj_modify = [](verbs::mlx5dv_devx_obj* object, const void* in, std::size_t in_bytes,
                           void* out, std::size_t out_bytes) {
      return refuses(in, out) ? -1 : soft().devx_obj_modify(object, in, in_bytes, out, out_bytes);
    };
    return t;
  }();
  return the_table;
}
const bool registered = verbs::register_provider(&table());

std::shared_ptr<Device> open(const char* name = "") {
  QueueOptions options;
  options.depth = 64;
  return Device::open("picky", name, "", "", Place::cpu(), options);
}

class GdaDevice : public ::testing::Test {
 protected:
  void SetUp() override { wrong = {}; }
  void TearDown() override {
    wrong = {};
    EXPECT_EQ(contexts, 0);
    EXPECT_EQ(domains, 0);
  }
};

TEST_F(GdaDevice, OneThatLooksRealIsTaken) {
  ASSERT_TRUE(registered);
  const std::shared_ptr<Device> device = open();
  EXPECT_FALSE(device->emulated());
  EXPECT_EQ(contexts, 1);
}

TEST_F(GdaDevice, WhyOneCannotBeUsedIsSaid) {
  struct Case {
    const char* said;
    std::function<void()> change;
  };
  using namespace mlx5;  // NOLINT: fields
  const auto lacks = [](Field field) {
    return [field] {
      wrong.capability = [field](std::uint8_t* capability) { set(capability, field, 0); };
    };
  };
  const std::vector<Case> cases = {
      {"no RDMA device", [] { wrong.no_device = true; }},
      {"not an mlx5 device", [] { wrong.not_mlx5 = true; }},
      {"cannot be opened: Permission denied", [] { wrong.no_open = true; }},
      {"DevX commands are refused: Operation not permitted", [] { wrong.no_commands = true; }},
      {"it has no RC queues or no atomics", lacks(hca_cap::reliable_connected)},
      {"it has no RC queues or no atomics", lacks(hca_cap::atomic)},
      {"it cannot ignore completion queue overrun", lacks(hca_cap::cq_overrun_ignore)},
      {"MARROW_GDA_DEPTH=64 is above its limit of 1", lacks(hca_cap::log_max_qp_size)},
      {"no protection domain: Cannot allocate memory", [] { wrong.no_pd = true; }},
      {"the protection domain has no number", [] { wrong.no_number = true; }},
      {"no event queue", [] { wrong.no_events = true; }},
  };
  for (const Case& each : cases) {
    wrong = {};
    each.change();
    try {
      (void)open();
      ADD_FAILURE() << each.said << ": it was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Code::unsupported);
      EXPECT_THAT(error.what(), HasSubstr(each.said));
    }
    EXPECT_EQ(contexts, 0) << each.said;
    EXPECT_EQ(domains, 0) << each.said;
  }
  wrong = {};
  EXPECT_THAT([] { (void)open("mlx5_7"); },
              ::testing::Throws<Error>(
                  ::testing::Property(&Error::sentence, HasSubstr("no RDMA device named mlx5_7"))));
}

/// Memory for queues of 64 entries.
struct alignas(4096) QueueMemory {
  std::byte bytes[4 * 4096];
};
constexpr QueuePlace kPlace{0, 4096, 2 * 4096, 2 * 4096 + 64};

TEST_F(GdaDevice, QueuesThatCannotBeMadeAreNoLeak) {
  static QueueMemory memory;
  const auto make = [](const std::shared_ptr<Device>& device) -> Error {
    try {
      const Umem umem(device, memory.bytes, sizeof memory.bytes);
      const QueuePair pair(device, umem, kPlace, 0, false);
      QueuePair other(device, umem, kPlace, 0, false);
      other.connect(pair.number(), verbs::address_of(device->port()));
    } catch (const Error& error) {
      return error;
    }
    return {Code::ok, "made"};
  };
  const std::shared_ptr<Device> device = open();
  EXPECT_EQ(make(device).sentence(), "made");
  wrong.no_umem = true;
  Error error = make(device);
  EXPECT_EQ(error.code(), Code::out_of_memory);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("16384 bytes of queues cannot be registered"),
                                  HasSubstr("ulimit -l")));
  wrong = {};
  wrong.no_uar = true;
  error = make(device);
  EXPECT_EQ(error.code(), Code::out_of_memory);
  EXPECT_THAT(error.what(), AllOf(HasSubstr("has no doorbell register left"),
                                  HasSubstr("use fewer contexts or ranks")));
  struct Command {
    int opcode;
    const char* said;
  };
  for (const Command& each :
       {Command{mlx5::kCreateCq, "CREATE_CQ"}, Command{mlx5::kCreateQp, "CREATE_QP"},
        Command{mlx5::kQueryQp, "QUERY_QP"}, Command{mlx5::kRstToInit, "RST2INIT"},
        Command{mlx5::kInitToRtr, "INIT2RTR"}, Command{mlx5::kRtrToRts, "RTR2RTS"}}) {
    wrong = {};
    wrong.refused = each.opcode;
    wrong.status = 3;  // bad parameter
    error = make(device);
    EXPECT_EQ(error.code(), Code::network);
    EXPECT_THAT(error.what(),
                HasSubstr(std::string("refused ") + each.said + " (status 3, syndrome 2748)"));
    wrong.status = mlx5::kStatusNoResources;
    error = make(device);
    EXPECT_EQ(error.code(), Code::out_of_memory);
    EXPECT_THAT(error.what(), HasSubstr("a smaller MARROW_GDA_DEPTH"));
  }
  wrong = {};
  EXPECT_EQ(make(device).sentence(), "made");  // and again: nothing is in the way
}

}  // namespace
}  // namespace marrow::gda
