/* SPDX-License-Identifier: Apache-2.0
 * The smallest network: one rank that talks to itself, in C11, outside the library. It shows what a
 * plugin has to provide, and lets the proxy be measured with nothing behind it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "marrow/network.h"

#define QUEUE 4096u

struct message {
  uint32_t bytes;
  uint8_t data[MARROW_NETWORK_MAX_MESSAGE];
};
struct endpoint {
  marrow_network_events events;
  struct message messages[QUEUE]; /* ring of messages not yet delivered */
  uint32_t message_head, message_tail;
  marrow_network_completion done[QUEUE]; /* ring of completions not yet taken */
  uint32_t done_head, done_tail;
};
struct region {
  uint8_t* address;
  uint64_t bytes;
};

static _Thread_local char sentence[160] = "no error";
static int fail(int code, const char* text) {
  snprintf(sentence, sizeof sentence, "%s", text);
  return code;
}

static int init(const marrow_network_services* services, const char* options, void** instance) {
  if (services->version != MARROW_NETWORK_VERSION) return fail(MARROW_NETWORK_INVALID, "another version of network.h");
  if (options[0]) return fail(MARROW_NETWORK_INVALID, "network self has no options");
  *instance = (void*)services;
  services->log(services->user, 4, "network self is there");
  return MARROW_NETWORK_OK;
}
static void finalize(void* instance) { (void)instance; }

static int devices(void* instance, uint32_t* count) {
  (void)instance;
  *count = 1;
  return MARROW_NETWORK_OK;
}
static int properties(void* instance, uint32_t device, marrow_network_properties* out) {
  marrow_network_properties p = {0};
  (void)instance;
  (void)device;
  p.size = sizeof p;
  strcpy(p.device, "self");
  p.ordered = 1;
  p.host_only = 1;
  p.numa_node = -1;
  p.max_inline = MARROW_NETWORK_MAX_INLINE;
  p.max_message = 1u << 20;
  memcpy(out, &p, out->size < sizeof p ? out->size : sizeof p);
  return MARROW_NETWORK_OK;
}

static int listen_(void* instance, uint32_t device, uint32_t rank, uint32_t nranks,
                   const marrow_network_events* events, void** endpoint, marrow_network_address* address) {
  struct endpoint* e;
  (void)instance;
  (void)device;
  (void)rank;
  if (nranks != 1) return fail(MARROW_NETWORK_UNSUPPORTED, "network self connects one rank with itself");
  e = calloc(1, sizeof *e);
  if (!e) return fail(MARROW_NETWORK_NO_MEMORY, "out of memory");
  e->events = *events;
  address->bytes = 0;
  *endpoint = e;
  return MARROW_NETWORK_OK;
}
static int connect_(void* endpoint, const marrow_network_address* addresses, uint64_t timeout_ns) {
  (void)endpoint;
  (void)addresses;
  (void)timeout_ns;
  return MARROW_NETWORK_OK;
}
static void close_(void* endpoint) { free(endpoint); }

static int register_memory(void* endpoint, const marrow_network_memory* memory, void** region, void* key,
                           uint32_t* key_bytes) {
  struct region* r = malloc(sizeof *r);
  (void)endpoint;
  if (!r) return fail(MARROW_NETWORK_NO_MEMORY, "out of memory");
  r->address = memory->address;
  r->bytes = memory->bytes;
  *region = r;
  memcpy(key, &r, sizeof r);
  *key_bytes = sizeof r;
  return MARROW_NETWORK_OK;
}
static int deregister_memory(void* endpoint, void* region) {
  (void)endpoint;
  free(region);
  return MARROW_NETWORK_OK;
}
static int import_key(void* endpoint, uint32_t peer, const void* key, uint32_t key_bytes, void** remote) {
  (void)endpoint;
  (void)peer;
  if (key_bytes != sizeof *remote) return fail(MARROW_NETWORK_INVALID, "not a key of network self");
  memcpy(remote, key, sizeof *remote);
  return MARROW_NETWORK_OK;
}
static int release_key(void* endpoint, void* remote) {
  (void)endpoint;
  (void)remote;
  return MARROW_NETWORK_OK;
}

/* Aligned 8-byte words of a value land whole. */
static void store_value(uint8_t* to, const uint8_t* from, uint64_t bytes) {
  uint64_t i = 0;
  for (; ((uintptr_t)to & 7) == 0 && i + 8 <= bytes; i += 8) {
    uint64_t word;
    memcpy(&word, from + i, 8);
    __atomic_store_n((uint64_t*)(void*)(to + i), word, __ATOMIC_RELEASE);
  }
  for (; i < bytes; ++i) __atomic_store_n(to + i, from[i], __ATOMIC_RELEASE);
}

static int post(void* endpoint, const marrow_network_operation* operations, uint32_t n) {
  struct endpoint* e = endpoint;
  uint32_t i;
  for (i = 0; i < n && e->done_head - e->done_tail < QUEUE; ++i) {
    const marrow_network_operation* o = operations + i;
    const struct region* local = o->local;
    const struct region* remote = o->remote;
    marrow_network_completion* c;
    if (o->kind == MARROW_NETWORK_MESSAGE && e->message_head - e->message_tail == QUEUE) break;
    c = &e->done[e->done_head++ % QUEUE];
    c->token = o->token;
    c->value = 0;
    c->peer = o->peer;
    c->status = MARROW_NETWORK_OK;
    switch (o->kind) {
      case MARROW_NETWORK_PUT:
        memcpy(remote->address + o->remote_offset, local->address + o->local_offset, o->bytes);
        break;
      case MARROW_NETWORK_GET:
        memcpy(local->address + o->local_offset, remote->address + o->remote_offset, o->bytes);
        break;
      case MARROW_NETWORK_PUT_VALUE: store_value(remote->address + o->remote_offset, o->inline_data, o->bytes); break;
      case MARROW_NETWORK_MESSAGE: {
        struct message* m = &e->messages[e->message_head++ % QUEUE];
        m->bytes = (uint32_t)o->bytes;
        memcpy(m->data, o->inline_data, o->bytes);
        break;
      }
      case MARROW_NETWORK_FLUSH: break;
      default: c->status = MARROW_NETWORK_UNSUPPORTED;
    }
  }
  return (int)i;
}
/* The caller may post from its callback: only here, never inside post. */
static int progress(void* endpoint) {
  struct endpoint* e = endpoint;
  const uint32_t end = e->message_head;
  int called = 0;
  for (; e->message_tail != end; ++called) {
    const struct message m = e->messages[e->message_tail++ % QUEUE];
    e->events.message(e->events.user, 0, m.data, m.bytes);
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
  (void)endpoint;
  (void)peer;
  return MARROW_NETWORK_OK;
}
static const char* last_error(void) { return sentence; }

#ifndef PLUGIN_VERSION
#define PLUGIN_VERSION MARROW_NETWORK_VERSION
#endif

static const marrow_network network = {
    PLUGIN_VERSION, sizeof(marrow_network), "self", -1, 0, init, finalize, devices, properties, listen_, connect_,
    close_, register_memory, deregister_memory, import_key, release_key, post, progress, test, abort_, last_error,
};

const marrow_network* marrow_network_plugin(void);
const marrow_network* marrow_network_plugin(void) { return &network; }
