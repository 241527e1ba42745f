// SPDX-License-Identifier: Apache-2.0
// A provider of verbs that fails on request: softnic's functions behind a table that looks like a real
// NIC's (nothing of Marrow's own in it), each of which can be told to fail, and whose completions and
// events can be changed. It counts what was made and not destroyed.
#pragma once

#include <functional>
#include <string>

#include "verbs/table.hpp"

namespace marrow::test::faulty {

enum class Call {
  none,
  get_device_list,
  open_device,
  close_device,
  query_device,
  query_port,
  alloc_pd,
  dealloc_pd,
  reg_mr,
  dereg_mr,
  create_cq,
  destroy_cq,
  create_qp,
  destroy_qp,
  to_init,
  to_rtr,
  to_rts,
  to_err,
  post_send,
  post_recv,
  poll_cq,
};
const char* name(Call call);

struct Plan {
  Call call = Call::none;
  int error = 0;
  int skip = 0;    ///< calls that go well before
  int times = -1;  ///< how many fail; -1: all after that
  /// post_send: which request of the chain is refused.
  int bad_request = 0;
};
/// Replaces the plan of before. Nobody may be in a call.
void set(const Plan& plan);
/// The plan came into effect.
bool happened();

/// Changes each completion before the caller sees it; empty: none.
void on_completion(std::function<void(verbs::ibv_wc& wc)> change);
/// A poll gives at most so many completions, and often nothing. 0: as many as asked.
void short_polls(int most);
/// Changes what query_port says; empty: nothing.
void on_port(std::function<void(verbs::ibv_port_attr& port)> change);
/// Sees each modify_qp.
void on_modify(std::function<void(const verbs::ibv_qp_attr& attr, int mask)> look);
/// Sees each request that is posted.
void on_post(std::function<void(const verbs::ibv_send_wr& request)> look);
/// Fakes a RoCE port's GID table; empty: softnic's own.
void set_gids(std::vector<verbs::ibv_gid_entry> gids);
/// Delivers an asynchronous event to every open device. qp and cq stand for those made last.
void deliver(int type, int port = 1);

/// Objects that are there: contexts, domains, regions, queues.
int alive();

/// Everything off again.
void reset();

}  // namespace marrow::test::faulty
