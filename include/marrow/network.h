/* SPDX-License-Identifier: Apache-2.0
 * What the proxy posts to: the C interface of a network, version 1 (candidate: docs/network-plugin.md says
 * what may still change). Built-in networks and plugins (MARROW_NETWORK=path.so) are the same struct of
 * functions. It compiles as C11.
 *
 * The thread model is what keeps this small: each progress thread of each rank has its own endpoint,
 * connected to the same-numbered endpoint of every rank. post, progress and test of one endpoint are
 * called by one thread only. register_memory, deregister_memory, import_key, release_key and abort
 * may be called by another thread at the same time. No function may block, except connect,
 * import_key and close, which are bounded.
 *
 * Every function returns MARROW_NETWORK_OK or a negative error, whose sentence last_error() then
 * gives. An error names what was attempted and what is missing, for a person.
 */
#ifndef MARROW_NETWORK_H
#define MARROW_NETWORK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** Version of this interface; must match exactly. Within a version, structs only grow at their end, and
 * `size` says how much of one is there. */
#define MARROW_NETWORK_VERSION 1u
/** Symbol a plugin exports: const marrow_network* marrow_network_plugin(void). */
#define MARROW_NETWORK_SYMBOL "marrow_network_plugin"

#define MARROW_NETWORK_MAX_ADDRESS 256u /**< bytes of an endpoint's address */
#define MARROW_NETWORK_MAX_KEY 128u     /**< bytes of a region's key */
#define MARROW_NETWORK_MAX_MESSAGE 64u  /**< bytes of a message */
#define MARROW_NETWORK_MAX_INLINE 24u   /**< bytes of a put_value */

enum {
  MARROW_NETWORK_OK = 0,
  MARROW_NETWORK_ERROR = -1,       /**< the network or the operating system refused */
  MARROW_NETWORK_INVALID = -2,     /**< an argument outside its range: a bug of the caller */
  MARROW_NETWORK_UNSUPPORTED = -3, /**< the machine or this network lacks it */
  MARROW_NETWORK_PEER_FAILED = -4, /**< the peer's process or connection ended */
  MARROW_NETWORK_TIMEOUT = -5,     /**< the deadline passed */
  MARROW_NETWORK_NO_MEMORY = -6    /**< memory, locked memory or descriptors ran out */
};

/** What the caller lends to a network. It outlives every instance made with it. */
struct marrow_network;
typedef struct marrow_network_services {
  uint32_t version; /**< MARROW_NETWORK_VERSION */
  uint32_t size;    /**< sizeof(marrow_network_services) of the caller */
  void* user;       /**< first argument of all that follows */
  /** Writes one line. level: 2 warning, 3 information, 4 trace. Any thread. */
  void (*log)(void* user, int level, const char* text);
  /** Copy engine, or NULL: device memory cannot be reached. Called by the endpoint's thread.
   * Starts a copy between any two host or device addresses; *ticket names it. Copies of one thread
   * finish in order. */
  int (*copy)(void* user, void* to, const void* from, uint64_t bytes, uint64_t* ticket);
  /** 1: that copy and all before it are done. 0: not yet. Negative: failed. */
  int (*copy_test)(void* user, uint64_t ticket);
  /** Maps another process's device memory by its descriptor; returns a device address or NULL. */
  void* (*map_device)(void* user, int fd, uint64_t fd_offset, uint64_t bytes);
  void (*unmap_device)(void* user, void* address, uint64_t bytes);
  /** Text of a parameter of this communicator, e.g. "MARROW_NIC"; NULL: there is no such. Good until this
   * thread's next call of it. */
  const char* (*parameter)(void* user, const char* name);
  /** The registered network of that name, or NULL: for a network that wraps another. */
  const struct marrow_network* (*find)(void* user, const char* name);
  /** PCI address of the GPU whose kernels post, e.g. "0000:18:00.0", or NULL: none. For a network with several
   * devices, of which it takes the nearest. Only where `size` reaches it. */
  const char* place_pci;
} marrow_network_services;

/** What a device of the network can do. All of it is a promise, none is probed later. */
typedef struct marrow_network_properties {
  uint32_t size;   /**< set by the caller: bytes it can take */
  char device[64]; /**< name for people, e.g. "mlx5_0", "lo" */
  uint8_t
      ordered; /**< operations and messages of one endpoint to one peer land in the order posted */
  uint8_t
      atomics; /**< ADD, FETCH_ADD, COMPARE_SWAP are executed; else never posted: the peer's proxy does them */
  uint8_t device_memory;   /**< reads and writes device memory */
  uint8_t host_only;       /**< connects ranks of one host only */
  uint8_t emulated;        /**< software stands in for the hardware that is named */
  uint8_t immediate_bytes; /**< 0: PUT carries no immediate; an unordered network needs 4 */
  uint8_t
      needs_descriptor; /**< peers reach memory only if its file descriptor is known (or in one process) */
  uint8_t reserved;
  uint32_t max_inline;  /**< bytes PUT_VALUE takes; at least MARROW_NETWORK_MAX_INLINE */
  uint64_t max_message; /**< bytes one PUT or GET takes; larger ones are cut by the caller */
  int32_t numa_node;    /**< host memory and cores near the device; -1: unknown or none */
  uint32_t reserved2;
} marrow_network_properties;

/** Memory to register. */
typedef struct marrow_network_memory {
  void* address; /**< address to read and write it by: of the host, or of the device */
  uint64_t bytes;
  uint32_t device; /**< 1: device memory */
  int32_t fd;      /**< descriptor that another process maps it by (memfd, dma-buf, VMM), or -1 */
  uint64_t fd_offset; /**< byte 0 in that descriptor */
} marrow_network_memory;

/** Kinds of operations. */
enum {
  MARROW_NETWORK_PUT = 1, /**< local[local_offset] -> remote[remote_offset] */
  MARROW_NETWORK_PUT_VALUE =
      2, /**< inline_data -> remote[remote_offset]; aligned 8-byte words land whole, as if by a release store */
  MARROW_NETWORK_GET = 3,          /**< remote[remote_offset] -> local[local_offset] */
  MARROW_NETWORK_ADD = 4,          /**< 64-bit remote word += operand */
  MARROW_NETWORK_FETCH_ADD = 5,    /**< and the completion carries the old value */
  MARROW_NETWORK_COMPARE_SWAP = 6, /**< remote word = operand if it equals compare */
  MARROW_NETWORK_MESSAGE = 7,      /**< inline_data is delivered to the peer's callback, once */
  /** Completes when the peer can see every earlier operation to it. Posted on ordered networks only. */
  MARROW_NETWORK_FLUSH = 8
};

/** One operation. A completion with its token follows, whatever happens to it. */
typedef struct marrow_network_operation {
  uint32_t kind;
  uint32_t peer;
  uint64_t token;
  void* local;  /**< from register_memory; PUT, GET */
  void* remote; /**< from import_key of that peer; all but MESSAGE and FLUSH */
  uint64_t local_offset;
  uint64_t remote_offset;
  uint64_t bytes; /**< PUT, GET: payload; PUT_VALUE, MESSAGE: of inline_data */
  uint64_t operand;
  uint64_t compare;
  uint32_t immediate; /**< delivered with a PUT or PUT_VALUE when has_immediate */
  uint32_t has_immediate;
  uint8_t inline_data[MARROW_NETWORK_MAX_MESSAGE];
} marrow_network_operation;

/** PUT, PUT_VALUE, ADD, MESSAGE: the source may be reused. GET, FETCH_*: the result is here. */
typedef struct marrow_network_completion {
  uint64_t token;
  uint64_t value; /**< old value of a fetch */
  int32_t status; /**< MARROW_NETWORK_OK or a negative error */
  uint32_t peer;
} marrow_network_completion;

/** Called inside progress(), by the endpoint's thread. What the peer put before is visible when the
 * network is ordered. */
typedef struct marrow_network_events {
  void* user;
  void (*message)(void* user, uint32_t peer, const void* data, uint32_t bytes);
  /** A PUT or PUT_VALUE with this immediate has landed and is visible. */
  void (*immediate)(void* user, uint32_t peer, uint32_t immediate);
  /** The peer's endpoint or process ended; said once. Its messages were delivered before. */
  void (*peer_down)(void* user, uint32_t peer, const char* sentence);
} marrow_network_events;

typedef struct marrow_network_address {
  uint32_t bytes;
  uint8_t data[MARROW_NETWORK_MAX_ADDRESS];
} marrow_network_address;

typedef struct marrow_network {
  uint32_t version; /**< MARROW_NETWORK_VERSION it was built for */
  uint32_t size;    /**< sizeof(marrow_network) it was built for */
  const char* name; /**< what MARROW_NETWORK names it by: lower case, no '?' or '/' */
  int32_t
      priority; /**< with MARROW_NETWORK=auto the largest that every rank can use wins; negative: never by itself */
  uint32_t reserved;

  /** options: what follows '?' in MARROW_NETWORK, "key=value&key=value"; may be empty, never NULL. */
  int (*init)(const marrow_network_services* services, const char* options, void** instance);
  void (*finalize)(void* instance);
  /** Devices of this network on this host; 0 is not an error. */
  int (*devices)(void* instance, uint32_t* count);
  int (*properties)(void* instance, uint32_t device, marrow_network_properties* properties);

  /** Makes an endpoint and its address, which the caller carries to every rank. */
  int (*listen)(void* instance, uint32_t device, uint32_t rank, uint32_t nranks,
                const marrow_network_events* events, void** endpoint,
                marrow_network_address* address);
  /** Collective. addresses[rank] is our own; one of 0 bytes is of a rank that has failed already: its
      operations fail. Peers may be connected lazily; then the first operation
   * to one that cannot be reached completes with an error. timeout_ns bounds the call. */
  int (*connect)(void* endpoint, const marrow_network_address* addresses, uint64_t timeout_ns);
  /** Ends everything, bounded; outstanding operations are dropped. Also after a failed connect. */
  void (*close)(void* endpoint);

  /** key: at most MARROW_NETWORK_MAX_KEY bytes, carried to every rank when the region is a window. */
  int (*register_memory)(void* endpoint, const marrow_network_memory* memory, void** region,
                         void* key, uint32_t* key_bytes);
  int (*deregister_memory)(void* endpoint, void* region);
  int (*import_key)(void* endpoint, uint32_t peer, const void* key, uint32_t key_bytes,
                    void** remote);
  int (*release_key)(void* endpoint, void* remote);

  /** Posts n operations, all to one peer. Returns how many it took, 0..n; fewer: try the rest again later. */
  int (*post)(void* endpoint, const marrow_network_operation* operations, uint32_t n);
  /** Moves things and calls the event callbacks. Returns how many it called. */
  int (*progress)(void* endpoint);
  /** Takes up to n completions. Returns how many. */
  int (*test)(void* endpoint, marrow_network_completion* completions, uint32_t n);
  /** The peer is gone: its operations complete with MARROW_NETWORK_PEER_FAILED, also later ones. Those under way do so
   * once nothing of the network touches their memory, or within a second where it cannot know. */
  int (*abort)(void* endpoint, uint32_t peer);
  /** Sentence of this thread's last error. Never NULL; good until this thread's next call. */
  const char* (*last_error)(void);
} marrow_network;

/** Adds a network of this program to the table. Built-in ones call it before main(); the struct must
 * stay. Returns MARROW_NETWORK_OK, or MARROW_NETWORK_INVALID for another version, size or a name that
 * is taken. */
__attribute__((visibility("default"))) int marrow_network_register(const marrow_network* network);

#ifdef __cplusplus
}
#endif

#endif
