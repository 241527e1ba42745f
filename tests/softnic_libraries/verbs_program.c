// SPDX-License-Identifier: Apache-2.0
// A program as anyone would write it for an RDMA NIC: <infiniband/verbs.h> and -libverbs, nothing of
// Marrow. Two sides, in two threads or (argument "processes") two processes with ordinary memory, try
// every operation of an RC queue pair; with "srq" their receives are shared. Says what failed and exits 1.
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                           \
  do {                                                                                             \
    if (!(condition)) {                                                                            \
      fprintf(stderr, "%s:%d: %s: failed, errno %d (%s)\n", __FILE__, __LINE__, #condition, errno, \
              strerror(errno));                                                                    \
      exit(1);                                                                                     \
    }                                                                                              \
  } while (0)

enum { kBytes = 1 << 20, kPings = 200 };

struct address {
  uint32_t qpn, rkey;
  uint64_t memory;
  uint16_t lid;
};

struct side {
  int number, socket, shared_receives;
  struct ibv_context* context;
  struct ibv_pd* pd;
  struct ibv_comp_channel* channel;
  struct ibv_cq *sends, *receives;
  struct ibv_qp* qp;
  struct ibv_srq* srq;
  struct ibv_mr* mr;
  unsigned char* memory;
  struct address peer;
};

static void exchange(struct side* s, const void* mine, void* theirs, size_t bytes) {
  CHECK(write(s->socket, mine, bytes) == (ssize_t)bytes);
  CHECK(recv(s->socket, theirs, bytes, MSG_WAITALL) == (ssize_t)bytes);
}
static void meet(struct side* s) {
  char mine = 'x', theirs = 0;
  exchange(s, &mine, &theirs, 1);
}

static struct ibv_wc wait_for(struct ibv_cq* cq) {
  struct ibv_wc wc;
  struct timespec start, now;
  clock_gettime(CLOCK_MONOTONIC, &start);
  for (;;) {
    int n = ibv_poll_cq(cq, 1, &wc);
    CHECK(n >= 0);
    if (n == 1) return wc;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec - start.tv_sec > 20) {
      fprintf(stderr, "no completion within 20 s\n");
      exit(1);
    }
    sched_yield();
  }
}
static struct ibv_wc expect(struct ibv_cq* cq, uint64_t wr_id, enum ibv_wc_opcode opcode) {
  struct ibv_wc wc = wait_for(cq);
  if (wc.status != IBV_WC_SUCCESS || wc.wr_id != wr_id || wc.opcode != opcode) {
    fprintf(stderr, "completion: status %s, wr_id %lu (wanted %lu), opcode %d (wanted %d)\n",
            ibv_wc_status_str(wc.status), wc.wr_id, wr_id, wc.opcode, opcode);
    exit(1);
  }
  return wc;
}

static void open_side(struct side* s, int with_srq) {
  int count = 0;
  struct ibv_device** list = ibv_get_device_list(&count);
  CHECK(list && count == 1);
  CHECK(strncmp(ibv_get_device_name(list[0]), "mlx5", 4) == 0);
  s->context = ibv_open_device(list[0]);
  CHECK(s->context);
  ibv_free_device_list(list);
  struct ibv_device_attr device;
  CHECK(ibv_query_device(s->context, &device) == 0 && device.phys_port_cnt == 1);
  CHECK(s->pd = ibv_alloc_pd(s->context));
  CHECK(s->channel = ibv_create_comp_channel(s->context));
  CHECK(s->sends = ibv_create_cq(s->context, 64, NULL, NULL, 0));
  CHECK(s->receives = ibv_create_cq(s->context, 64, s, s->channel, 0));
  if (with_srq) {
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = 32, .max_sge = 2}};
    CHECK(s->srq = ibv_create_srq(s->pd, &attr));
  }
  struct ibv_qp_init_attr init = {.send_cq = s->sends,
                                  .recv_cq = s->receives,
                                  .srq = s->srq,
                                  .cap = {32, with_srq ? 0 : 32, 2, 2, 64},
                                  .qp_type = IBV_QPT_RC};
  CHECK(s->qp = ibv_create_qp(s->pd, &init));
  CHECK(init.cap.max_send_wr >= 32 && init.cap.max_inline_data >= 64);
  CHECK(s->memory = aligned_alloc(4096, kBytes));
  memset(s->memory, 0, kBytes);
  s->mr = ibv_reg_mr(s->pd, s->memory, kBytes,
                     IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                         IBV_ACCESS_REMOTE_ATOMIC);
  CHECK(s->mr);
  struct ibv_port_attr port;
  CHECK(ibv_query_port(s->context, 1, &port) == 0);
  CHECK(port.state == IBV_PORT_ACTIVE && port.link_layer == IBV_LINK_LAYER_INFINIBAND);
  CHECK(port.lid != 0);
  struct address mine = {s->qp->qp_num, s->mr->rkey, (uintptr_t)s->memory, port.lid};
  exchange(s, &mine, &s->peer, sizeof mine);
}

static void connect_side(struct side* s) {
  struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT,
                          .port_num = 1,
                          .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                                             IBV_ACCESS_REMOTE_ATOMIC};
  // Without what the transition needs it is refused.
  CHECK(ibv_modify_qp(s->qp, &a, IBV_QP_STATE) == EINVAL);
  CHECK(ibv_modify_qp(s->qp, &a,
                      IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) == 0);
  memset(&a, 0, sizeof a);
  a.qp_state = IBV_QPS_RTR;
  a.path_mtu = IBV_MTU_1024;
  a.dest_qp_num = s->peer.qpn;
  a.rq_psn = 17;
  a.max_dest_rd_atomic = 16;
  a.min_rnr_timer = 12;
  a.ah_attr.dlid = s->peer.lid;
  a.ah_attr.port_num = 1;
  CHECK(ibv_modify_qp(s->qp, &a,
                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                          IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER) == 0);
  memset(&a, 0, sizeof a);
  a.qp_state = IBV_QPS_RTS;
  a.timeout = 14;
  a.retry_cnt = 7;
  a.rnr_retry = 7;
  a.max_rd_atomic = 16;
  CHECK(ibv_modify_qp(s->qp, &a,
                      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                          IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC) == 0);
  struct ibv_qp_init_attr init;
  CHECK(ibv_query_qp(s->qp, &a, IBV_QP_STATE, &init) == 0);
  CHECK(a.qp_state == IBV_QPS_RTS && a.dest_qp_num == s->peer.qpn && a.path_mtu == IBV_MTU_1024);
  meet(s);
}

static void post_receive(struct side* s, uint64_t wr_id, size_t at, uint32_t first, uint32_t more) {
  struct ibv_sge sges[2] = {{(uintptr_t)s->memory + at, first, s->mr->lkey},
                            {(uintptr_t)s->memory + at + first + 64, more, s->mr->lkey}};
  struct ibv_recv_wr wr = {.wr_id = wr_id, .sg_list = sges, .num_sge = more ? 2 : 1}, *bad;
  CHECK((s->srq ? ibv_post_srq_recv(s->srq, &wr, &bad) : ibv_post_recv(s->qp, &wr, &bad)) == 0);
}

static int post(struct side* s, enum ibv_wr_opcode opcode, uint64_t wr_id, size_t from,
                uint32_t bytes, size_t to, unsigned flags) {
  struct ibv_sge sge = {(uintptr_t)s->memory + from, bytes, s->mr->lkey};
  struct ibv_send_wr wr = {.wr_id = wr_id,
                           .sg_list = &sge,
                           .num_sge = 1,
                           .opcode = opcode,
                           .send_flags = flags | IBV_SEND_SIGNALED,
                           .imm_data = htobe32(0xabcd0000u + (uint32_t)wr_id)};
  struct ibv_send_wr* bad;
  if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || opcode == IBV_WR_ATOMIC_CMP_AND_SWP) {
    wr.wr.atomic.remote_addr = s->peer.memory + to;
    wr.wr.atomic.rkey = s->peer.rkey;
    wr.wr.atomic.compare_add = 5;
    wr.wr.atomic.swap = 77;
  } else {
    wr.wr.rdma.remote_addr = s->peer.memory + to;
    wr.wr.rdma.rkey = s->peer.rkey;
  }
  return ibv_post_send(s->qp, &wr, &bad);
}

static void fill(struct side* s, size_t at, size_t bytes, unsigned seed) {
  for (size_t i = 0; i < bytes; ++i) s->memory[at + i] = (unsigned char)(seed + i * 7 + i / 251);
}
static void check(struct side* s, size_t at, size_t bytes, unsigned seed, size_t skipped) {
  for (size_t i = 0; i < bytes; ++i) {
    unsigned char want = (unsigned char)(seed + (i + skipped) * 7 + (i + skipped) / 251);
    if (s->memory[at + i] != want) {
      fprintf(stderr, "side %d: byte %zu is %d, not %d\n", s->number, at + i, s->memory[at + i],
              want);
      exit(1);
    }
  }
}

static void ping_pong(struct side* s) {
  for (int i = 0; i < 8; ++i) post_receive(s, 100 + i, 4096 * (1 + (i & 7)), 512, 0);
  meet(s);
  for (int i = 0; i < kPings; ++i) {
    if (s->number == 0) {
      fill(s, 0, 512, i);
      CHECK(post(s, IBV_WR_SEND, 7, 0, 512, 0, 0) == 0);
      expect(s->sends, 7, IBV_WC_SEND);
    }
    const struct ibv_wc wc = expect(s->receives, 100 + (i & 7), IBV_WC_RECV);
    CHECK(wc.byte_len == 512 && wc.qp_num == s->qp->qp_num && wc.wc_flags == 0);
    check(s, 4096 * (1 + (i & 7)), 512, i, 0);
    post_receive(s, 100 + (i & 7), 4096 * (1 + (i & 7)), 512, 0);
    if (s->number == 1) {
      fill(s, 0, 512, i);
      CHECK(post(s, IBV_WR_SEND, 8, 0, 512, 0, IBV_SEND_SOLICITED) == 0);
      expect(s->sends, 8, IBV_WC_SEND);
    }
  }
  meet(s);
}

/// Side 0 acts, side 1 checks.
static void one_sided(struct side* s) {
  enum { kLong = 200000, kAt = 1 << 18, kWord = 1 << 19 };
  uint64_t* word = (uint64_t*)(s->memory + kWord);
  if (s->number == 1) {
    memset(s->memory + kAt, 0, kLong + 64);
    *word = 5;
  }
  meet(s);
  if (s->number == 0) {
    fill(s, kAt, kLong, 3);
    CHECK(post(s, IBV_WR_RDMA_WRITE, 21, kAt, kLong, kAt, 0) == 0);
    CHECK(expect(s->sends, 21, IBV_WC_RDMA_WRITE).status == 0);
    CHECK(post(s, IBV_WR_RDMA_WRITE, 22, kAt, 60, kAt + kLong, IBV_SEND_INLINE) == 0);
    memset(s->memory + kAt, 0, 60);  // inline: taken at once
    expect(s->sends, 22, IBV_WC_RDMA_WRITE);
    CHECK(post(s, IBV_WR_RDMA_READ, 23, 4096, 512, kAt + 64, 0) == 0);
    CHECK(expect(s->sends, 23, IBV_WC_RDMA_READ).byte_len == 512);
    check(s, 4096, 512, 3, 64);
    CHECK(post(s, IBV_WR_ATOMIC_FETCH_AND_ADD, 24, 64, 8, kWord, 0) == 0);
    CHECK(expect(s->sends, 24, IBV_WC_FETCH_ADD).byte_len == 8);
    CHECK(*(uint64_t*)(s->memory + 64) == 5);
    CHECK(post(s, IBV_WR_ATOMIC_CMP_AND_SWP, 25, 64, 8, kWord, IBV_SEND_FENCE) == 0);
    expect(s->sends, 25, IBV_WC_COMP_SWAP);
    CHECK(*(uint64_t*)(s->memory + 64) == 10);  // not 5: no swap
    CHECK(post(s, IBV_WR_RDMA_WRITE_WITH_IMM, 26, 4096, 256, 8192, 0) == 0);
    expect(s->sends, 26, IBV_WC_RDMA_WRITE);
    CHECK(post(s, IBV_WR_SEND_WITH_IMM, 27, 4096, 500, 0, 0) == 0);
    expect(s->sends, 27, IBV_WC_SEND);
  } else {
    struct ibv_wc wc = expect(s->receives, 100 + kPings % 8, IBV_WC_RECV_RDMA_WITH_IMM);
    CHECK(wc.wc_flags == IBV_WC_WITH_IMM && be32toh(wc.imm_data) == 0xabcd0000u + 26);
    CHECK(wc.byte_len == 256);
    check(s, 8192, 256, 3, 64);
    check(s, kAt, kLong, 3, 0);
    check(s, kAt + kLong, 60, 3, 0);
    CHECK(*word == 10);
    wc = expect(s->receives, 100 + (kPings + 1) % 8, IBV_WC_RECV);
    CHECK(wc.wc_flags == IBV_WC_WITH_IMM && be32toh(wc.imm_data) == 0xabcd0000u + 27);
    CHECK(wc.byte_len == 500);
  }
  meet(s);
}

/// A message of many packets into two buffers, and the event that announces it.
static void long_message(struct side* s) {
  enum { kMessage = 100000, kAt = 1 << 18 };
  if (s->number == 1) {
    struct ibv_cq* cq = NULL;
    void* context = NULL;
    for (int i = 0; i < 6; ++i) post_receive(s, 200 + i, kAt, 30000, 90000);
    memset(s->memory + kAt, 0, 200000);
    CHECK(ibv_req_notify_cq(s->receives, 0) == 0);
    meet(s);
    // What is left of the ping-pong's receives is too short by far, so those are used up first.
    for (int i = 2; i < 8; ++i) {
      expect(s->receives, 100 + (kPings + i) % 8, IBV_WC_RECV);
    }
    CHECK(ibv_get_cq_event(s->channel, &cq, &context) == 0);
    CHECK(cq == s->receives && context == s);
    ibv_ack_cq_events(cq, 1);
    meet(s);
    CHECK(ibv_req_notify_cq(s->receives, 0) == 0);
    meet(s);
    CHECK(ibv_get_cq_event(s->channel, &cq, &context) == 0);
    ibv_ack_cq_events(cq, 1);
    CHECK(expect(s->receives, 200, IBV_WC_RECV).byte_len == kMessage);
    check(s, kAt, 30000, 9, 0);
    check(s, kAt + 30000 + 64, kMessage - 30000, 9, 30000);
  } else {
    meet(s);
    for (int i = 2; i < 8; ++i) {
      CHECK(post(s, IBV_WR_SEND, 30 + i, 0, i, 0, IBV_SEND_INLINE) == 0);
      expect(s->sends, 30 + i, IBV_WC_SEND);
    }
    meet(s);
    meet(s);
    fill(s, kAt, kMessage, 9);
    CHECK(post(s, IBV_WR_SEND, 40, kAt, kMessage, 0, 0) == 0);
    expect(s->sends, 40, IBV_WC_SEND);
  }
  meet(s);
}

/// A key of nobody: the right status, the queue in error, what follows flushed.
static void errors(struct side* s) {
  if (s->number == 0) {
    s->peer.rkey ^= 0x5500;
    CHECK(post(s, IBV_WR_RDMA_WRITE, 51, 0, 64, 0, 0) == 0);
    CHECK(post(s, IBV_WR_RDMA_WRITE, 52, 0, 64, 0, 0) == 0);
    struct ibv_wc wc = wait_for(s->sends);
    CHECK(wc.status == IBV_WC_REM_ACCESS_ERR && wc.wr_id == 51);
    wc = wait_for(s->sends);
    CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 52);
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    CHECK(ibv_query_qp(s->qp, &attr, IBV_QP_STATE, &init) == 0 && attr.qp_state == IBV_QPS_ERR);
    // Receives are flushed too.
    if (!s->srq) CHECK(wait_for(s->receives).status == IBV_WC_WR_FLUSH_ERR);
  }
  meet(s);
}

static void close_side(struct side* s) {
  CHECK(ibv_dealloc_pd(s->pd) == EBUSY);
  CHECK(ibv_destroy_cq(s->receives) == EBUSY);
  CHECK(ibv_destroy_qp(s->qp) == 0);
  if (s->srq) CHECK(ibv_destroy_srq(s->srq) == 0);
  CHECK(ibv_destroy_cq(s->receives) == 0 && ibv_destroy_cq(s->sends) == 0);
  CHECK(ibv_destroy_comp_channel(s->channel) == 0);
  CHECK(ibv_dereg_mr(s->mr) == 0 && ibv_dealloc_pd(s->pd) == 0);
  CHECK(ibv_close_device(s->context) == 0);
  free(s->memory);
}

static void* run(void* argument) {
  struct side* s = argument;
  open_side(s, s->shared_receives);
  connect_side(s);
  ping_pong(s);
  one_sided(s);
  long_message(s);
  errors(s);
  close_side(s);
  return NULL;
}

int main(int argc, char** argv) {
  int ends[2];
  struct side sides[2] = {{.number = 0}, {.number = 1}};
  CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  for (int i = 0; i < 2; ++i) {
    sides[i].socket = ends[i];
    sides[i].shared_receives = argc > 2 && strcmp(argv[2], "srq") == 0;
  }
  if (argc > 1 && strcmp(argv[1], "processes") == 0) {
    const pid_t child = fork();
    CHECK(child >= 0);
    close(ends[child != 0]);  // a side that dies is noticed by the other
    run(&sides[child == 0]);
    if (child == 0) return 0;
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
  } else {
    pthread_t threads[2];
    for (int i = 0; i < 2; ++i) CHECK(pthread_create(&threads[i], NULL, run, &sides[i]) == 0);
    for (int i = 0; i < 2; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
  }
  puts("ok");
  return 0;
}
