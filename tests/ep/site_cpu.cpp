// SPDX-License-Identifier: Apache-2.0
#include "ep/site.hpp"

namespace marrow::ep_test {
namespace {

class CpuSite final : public Site {
 public:
  Place place() override { return Place::cpu(); }
  Memory& memory() override { return memory_; }
  void* other_stream() override { return nullptr; }
  void order(void*, void*) override {}
  void scribble(void*, void* at, std::size_t bytes) override { std::memset(at, 0xff, bytes); }
  void copy(void*, void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
  }
  std::function<void()> graph(const std::function<void()>& body) override { return body; }

 private:
  HostMemory memory_;
};

}  // namespace

std::unique_ptr<Site> make_site(int) { return std::make_unique<CpuSite>(); }
int most_ranks() { return 64; }
int sms_of_a_rank() { return 0; }
bool on_gpus() { return false; }
std::string context_lost() { return {}; }
std::vector<std::string> paths() { return {"lsa", "gda", "proxy", "mixed", "teams", "alone"}; }

}  // namespace marrow::ep_test
