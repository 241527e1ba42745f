/* SPDX-License-Identifier: Apache-2.0
 * A whole network in C11: it connects ranks that are threads of one process. Start yours from it: every function of
 * marrow/network.h is here, with what it has to promise. Needs the header alone, no library of Marrow's. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <marrow/network.h>

#define QUEUE 1024u

struct message {
  uint32_t source, bytes;
  uint8_t data[MARROW_NETWORK_MAX_MESSAGE];
};
struct endpoint {
  marrow_network_events events;
  uint32_t rank, nranks;
  struct endpoint** peers;  /* all ranks' endpoints of this number, ours among them */
  atomic_uchar* gone;       /* peers that abort() named */
  atomic_uint users;        /* we and those connected to us: the last one frees it */
  atomic_uint closed;       /* 1: its thread looks no more */
  unsigned char* told_down; /* peers whose end was told */
  pthread_mutex_t lock;     /* of the inbox: peers' threads fill it */
  struct message inbox[QUEUE];
  uint32_t in_head, in_tail;
  marrow_network_completion done[QUEUE]; /* not taken yet; our thread alone */
  uint32_t done_head, done_tail;
};
struct address {
  struct endpoint* endpoint;
  long process;
};

/* An error is a code, and a sentence for a person that last_error() gives to the same thread. */
static _Thread_local char sentence[200] = "no error";
static int fail(int code, const char* text, long value) {
  snprintf(sentence, sizeof sentence, text, value);
  return code;
}
static const char* last_error(void) { return sentence; }

static int init(const marrow_network_services* services, const char* options, void** instance) {
  if (services->version != MARROW_NETWORK_VERSION)
    return fail(MARROW_NETWORK_UNSUPPORTED, "network threads is built for another version than %ld", services->version);
  if (options[0]) return fail(MARROW_NETWORK_INVALID, "network threads has no options%.0ld", 0);
  services->log(services->user, 4, "network threads is there");
  *instance = (void*)services; /* outlives us */
  return MARROW_NETWORK_OK;
}
static void finalize(void* instance) { (void)instance; }

static int devices(void* instance, uint32_t* count) {
  (void)instance;
  *count = 1;
  return MARROW_NETWORK_OK;
}
/* Promises. memcpy and an inbox behind a lock keep the order; the proxy does atomics for us. */
static int properties(void* instance, uint32_t device, marrow_network_properties* out) {
  marrow_network_properties p = {.size = sizeof p,
                                 .device = "threads",
                                 .ordered = 1,
                                 .host_only = 1,
                                 .max_inline = MARROW_NETWORK_MAX_INLINE,
                                 .max_message = 1u << 20,
                                 .numa_node = -1};
  (void)instance;
  (void)device;
  memcpy(out, &p, out->size < sizeof p ? out->size : sizeof p); /* a caller may know less of it than we */
  return MARROW_NETWORK_OK;
}

static int listen_(void* instance, uint32_t device, uint32_t rank, uint32_t nranks, const marrow_network_events* events,
                   void** endpoint, marrow_network_address* address) {
  struct endpoint* e = calloc(1, sizeof *e);
  struct address ours = {e, (long)getpid()};
  (void)instance;
  (void)device;
  if (e) e->peers = calloc(nranks, sizeof *e->peers), e->gone = calloc(nranks, 1), e->told_down = calloc(nranks, 1);
  if (!e || !e->peers || !e->gone || !e->told_down) {
    if (e) free(e->told_down), free(e->gone), free(e->peers);
    free(e);
    return fail(MARROW_NETWORK_NO_MEMORY, "no memory for %ld ranks", nranks);
  }
  e->events = *events;
  e->rank = rank;
  e->nranks = nranks;
  e->users = 1;
  pthread_mutex_init(&e->lock, NULL);
  memcpy(address->data, &ours, sizeof ours);
  address->bytes = sizeof ours;
  *endpoint = e;
  return MARROW_NETWORK_OK;
}
static int connect_(void* endpoint, const marrow_network_address* addresses, uint64_t timeout_ns) {
  struct endpoint* e = endpoint;
  (void)timeout_ns; /* nobody is waited for */
  for (uint32_t r = 0; r < e->nranks; ++r) {
    struct address theirs;
    if (addresses[r].bytes == 0) { /* failed already */
      e->gone[r] = 1;
      continue;
    }
    memcpy(&theirs, addresses[r].data, sizeof theirs);
    if (addresses[r].bytes != sizeof theirs || theirs.process != (long)getpid())
      return fail(MARROW_NETWORK_UNSUPPORTED, "rank %ld is no thread of this process", r);
    e->peers[r] = theirs.endpoint;
    atomic_fetch_add(&theirs.endpoint->users, 1);
  }
  return MARROW_NETWORK_OK;
}
static void let_go(struct endpoint* e) {
  if (!e || atomic_fetch_sub(&e->users, 1) != 1) return;
  pthread_mutex_destroy(&e->lock);
  free(e->peers), free(e->gone), free(e->told_down), free(e);
}
static void close_(void* endpoint) {
  struct endpoint* e = endpoint;
  atomic_store(&e->closed, 1);
  for (uint32_t r = 0; r < e->nranks; ++r) {
    struct endpoint* peer = e->peers[r];
    e->peers[r] = NULL;
    let_go(peer);
  }
  let_go(e);
}

/* One address space: a region is its address, a key is that too, for all peers. */
static int register_memory(void* endpoint, const marrow_network_memory* memory, void** region, void* key,
                           uint32_t* key_bytes) {
  (void)endpoint;
  if (memory->device) return fail(MARROW_NETWORK_UNSUPPORTED, "network threads does not reach device memory%.0ld", 0);
  *region = memory->address;
  memcpy(key, &memory->address, sizeof memory->address);
  *key_bytes = sizeof memory->address;
  return MARROW_NETWORK_OK;
}
static int import_key(void* endpoint, uint32_t peer, const void* key, uint32_t key_bytes, void** remote) {
  (void)endpoint;
  if (key_bytes != sizeof *remote) return fail(MARROW_NETWORK_INVALID, "rank %ld's key is not of network threads", peer);
  memcpy(remote, key, sizeof *remote);
  return MARROW_NETWORK_OK;
}
static int forget(void* endpoint, void* region_or_remote) {
  (void)endpoint;
  (void)region_or_remote;
  return MARROW_NETWORK_OK;
}

/* A kernel may poll an aligned 8-byte word of a value: it lands whole, and after what came before. */
static void store_value(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  for (; ((uintptr_t)to & 7) == 0 && bytes >= 8; to += 8, from += 8, bytes -= 8) {
    uint64_t word;
    memcpy(&word, from, 8);
    atomic_store_explicit((_Atomic uint64_t*)(void*)to, word, memory_order_release);
  }
  for (; bytes; ++to, ++from, --bytes) atomic_store_explicit((_Atomic uint8_t*)to, *from, memory_order_release);
}
static int send(struct endpoint* e, const marrow_network_operation* o) {
  struct endpoint* peer = e->peers[o->peer];
  int room;
  pthread_mutex_lock(&peer->lock);
  room = peer->in_head - peer->in_tail < QUEUE;
  if (room) {
    struct message* m = &peer->inbox[peer->in_head++ % QUEUE];
    m->source = e->rank;
    m->bytes = (uint32_t)o->bytes;
    memcpy(m->data, o->inline_data, o->bytes);
  }
  pthread_mutex_unlock(&peer->lock);
  return room;
}
/* Takes what there is room for. Each operation taken completes once, whatever happens to it. */
static int post(void* endpoint, const marrow_network_operation* operations, uint32_t n) {
  struct endpoint* e = endpoint;
  uint32_t i;
  for (i = 0; i < n && e->done_head - e->done_tail < QUEUE; ++i) {
    const marrow_network_operation* o = operations + i;
    uint8_t* remote = (uint8_t*)o->remote + o->remote_offset;
    uint8_t* local = (uint8_t*)o->local + o->local_offset;
    int status = MARROW_NETWORK_OK;
    if (e->gone[o->peer]) {
      status = MARROW_NETWORK_PEER_FAILED;
    } else if (o->kind == MARROW_NETWORK_PUT) {
      memcpy(remote, local, o->bytes);
    } else if (o->kind == MARROW_NETWORK_GET) {
      memcpy(local, remote, o->bytes);
    } else if (o->kind == MARROW_NETWORK_PUT_VALUE) {
      store_value(remote, o->inline_data, o->bytes);
    } else if (o->kind == MARROW_NETWORK_MESSAGE) {
      if (!send(e, o)) break; /* try again later */
    } else if (o->kind != MARROW_NETWORK_FLUSH) {
      status = MARROW_NETWORK_UNSUPPORTED; /* atomics: not promised, so never posted */
    }
    e->done[e->done_head++ % QUEUE] = (marrow_network_completion){o->token, 0, status, o->peer};
  }
  return (int)i;
}
/* The only place that calls back. A callback may post, so no lock is held meanwhile. */
static int progress(void* endpoint) {
  struct endpoint* e = endpoint;
  int called = 0;
  for (int i = 0; i < 64; ++i, ++called) {
    struct message m = {0};
    int any;
    pthread_mutex_lock(&e->lock);
    any = e->in_tail != e->in_head;
    if (any) m = e->inbox[e->in_tail++ % QUEUE];
    pthread_mutex_unlock(&e->lock);
    if (!any) break;
    e->events.message(e->events.user, m.source, m.data, m.bytes);
  }
  for (uint32_t r = 0; called == 0 && r < e->nranks; ++r) {
    if (e->told_down[r] || !e->peers[r] || !atomic_load(&e->peers[r]->closed)) continue;
    e->told_down[r] = e->gone[r] = 1;
    fail(MARROW_NETWORK_PEER_FAILED, "rank %ld closed its endpoint", r);
    e->events.peer_down(e->events.user, r, sentence);
    ++called;
  }
  return called;
}
static int test(void* endpoint, marrow_network_completion* completions, uint32_t n) {
  struct endpoint* e = endpoint;
  uint32_t i;
  for (i = 0; i < n && e->done_tail != e->done_head; ++i) completions[i] = e->done[e->done_tail++ % QUEUE];
  return (int)i;
}
static int abort_(void* endpoint, uint32_t peer) {
  atomic_store(&((struct endpoint*)endpoint)->gone[peer], 1);
  return MARROW_NETWORK_OK;
}

static const marrow_network network = {
    .version = MARROW_NETWORK_VERSION, .size = sizeof(marrow_network), .name = "threads", .priority = -1,
    .init = init, .finalize = finalize, .devices = devices, .properties = properties,
    .listen = listen_, .connect = connect_, .close = close_,
    .register_memory = register_memory, .deregister_memory = forget, .import_key = import_key, .release_key = forget,
    .post = post, .progress = progress, .test = test, .abort = abort_, .last_error = last_error};

const marrow_network* marrow_network_plugin(void);
const marrow_network* marrow_network_plugin(void) { return &network; }
