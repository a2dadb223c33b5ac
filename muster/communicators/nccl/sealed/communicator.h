/* One direction between two ranks: several connections, over which the pieces of each message are divided. */
#ifndef MUSTER_COMMUNICATOR_H
#define MUSTER_COMMUNICATOR_H

#include <pthread.h>
#include <stdatomic.h>

#include "errors.h"
#include "handshake.h"
#include "nccl_net.h"
#include "records.h"

/* LEAST_PIECE: a message is not divided into smaller ones; SMALL: so few bytes are sealed sooner than a thread is woken. */
enum { LANES = 2, RUN_PIECES = 4, LEAST_PIECE = 65536, SMALL = 16384 };

typedef struct communicator communicator_t;
typedef struct connection connection_t;

typedef struct {
  communicator_t *communicator;
  atomic_bool open; /* from isend or irecv until test has said that it is done */
  uint64_t message;
  unsigned char *data;
  int size;              /* of a send: exact; of a receive: at most */
  int piece;             /* of a send: into pieces of how many bytes it is divided */
  _Atomic int64_t total; /* of a receive: -1 until a header has told */
  _Atomic int64_t left;  /* of a send: pieces that the kernel has not taken */
  _Atomic int64_t got;   /* of a receive: bytes copied */
} request_t;

/* An actor that takes a record all its way: seals it and sends it, or reads it and opens it, while it is in a core's cache.
 * Two of a connection take turns at the socket, so that one seals or opens while the other one sends or reads. */
typedef struct {
  actor_t actor;
  connection_t *connection;
  direction_t direction; /* its own: its records are in ascending order */
  atomic_bool full;      /* it holds a record that is not sent, or not opened */
  atomic_bool waits;     /* a send: for its turn */
  uint64_t record;
  header_t header;
  request_t *request; /* of a send; NULL: the record that closes */
  unsigned char *block;
  unsigned char sealed_header[SEALED_HEADER_SIZE];
  const unsigned char *body;
  size_t moved; /* of a send: bytes that are out */
} lane_t;

struct connection {
  communicator_t *communicator;
  int socket;
  watch_t watch;
  actor_t watcher; /* hears what the socket's events say */
  lane_t lanes[LANES];
  direction_t back; /* the other way, in which only the end is said */
  uint64_t records, back_records;
  atomic_bool said_close;
  /* a send */
  _Atomic uint64_t sent; /* records: whose turn it is */
  lane_t *blocked;       /* waits for room in the socket */
  atomic_bool was_full;  /* the socket had no room the last time: to seal sooner helps nobody */
  atomic_int broken;     /* why the socket takes no more: an errno */
  size_t back_moved;     /* bytes that came back */
  bool peer_closed;      /* the receiver has said that it closes */
  atomic_bool close_written; /* the record that closes is with the kernel */
  /* a receive: what follows belongs to the lane whose turn it is */
  atomic_int turn;
  _Atomic uint64_t opened; /* records */
  atomic_bool early;       /* what came waits for its irecv */
  size_t moved;            /* bytes of the present header, or body, that are in */
  bool header_known;
  unsigned char header_bytes[SEALED_HEADER_SIZE]; /* of a send: what comes back */
};

struct communicator {
  bool sends;
  int count, next;
  char peer[ADDRESS_TEXT_SIZE];
  atomic_int error;      /* an ncclResult_t; the first one stays */
  atomic_bool unsaid;    /* it ended while nothing was asked of it: why is a note in NCCL's log, and no warning yet */
  char why[REASON_SIZE]; /* the sentence; written before error is set */
  atomic_bool ending;    /* close has begun: nothing that follows is an error */
  atomic_bool peer_gone; /* a send: the receiver has closed in order */
  atomic_int open_requests, closed;
  pthread_mutex_t lock; /* a send: what is to be sealed next, and which lanes wait for room */
  pthread_cond_t written;
  uint64_t to_seal, sealed_up_to; /* message and offset */
  _Atomic uint64_t posted;        /* requests that there have been */
  request_t requests[NCCL_MAX_REQUESTS];
  connection_t connections[MAX_CONNECTIONS];
};

/* Makes one of `count` finished handshakes, in the order of their connections; takes their sockets. NULL where it fails. */
communicator_t *communicator_begin(bool sends, int count, handshake_t *const handshakes[]);

/* Ends it with an error. The first failure's sentence becomes the reason, with the peer's address before it. */
__attribute__((format(printf, 3, 4))) void communicator_fail(communicator_t *communicator, ncclResult_t result,
                                                             const char *format, ...);

/* What it ended with, for a caller that NCCL hears of: ncclSuccess while it lives.
 *
 * NCCL's error holds the last warning, so one that ended unsaid becomes a warning now, when something is asked of it. */
ncclResult_t communicator_error(communicator_t *communicator);

/* Says the end to the peer, if all requests are done, and frees it. */
void communicator_close(communicator_t *communicator);

/* A place for one more request, or NULL where NCCL has NCCL_MAX_REQUESTS of them open. */
request_t *request_open(communicator_t *communicator, void *data, int size);

/* Whether another thread could take the next record at the same time: to wake it takes as long as to seal a small one. */
static inline bool lane_needs_help(const lane_t *lane) {
  return SEALED && lane->header.length > LEAST_PIECE && pool_has_sleeper();
}

/* The other lane of its connection. */
static inline lane_t *other_lane(lane_t *lane) {
  return &lane->connection->lanes[lane == &lane->connection->lanes[0]];
}

ncclResult_t request_test(request_t *request, int *done, int *size);

/* Sending (sending.c). */
ncclResult_t send_begin(communicator_t *communicator, void *data, int size, request_t **request);
actor_run_t send_run_lane, send_run_watcher;

/* Receiving (receiving.c). */
ncclResult_t receive_begin(communicator_t *communicator, void *data, int size, request_t **request);
actor_run_t receive_run_lane, receive_run_watcher;

#endif
