/* One direction between two ranks: several connections, over which the pieces of each message are divided. */
#ifndef MUSTER_COMMUNICATOR_H
#define MUSTER_COMMUNICATOR_H

#include <pthread.h>
#include <stdatomic.h>

#include "errors.h"
#include "handshake.h"
#include "nccl_net.h"
#include "records.h"

enum { RING = 8, RUN_PIECES = 16, SMALL = 16384 };

typedef struct communicator communicator_t;

typedef struct {
  communicator_t *communicator;
  atomic_bool open; /* from isend or irecv until test has said that it is done */
  uint64_t message;
  unsigned char *data;
  int size;              /* of a send: exact; of a receive: at most */
  _Atomic int64_t total; /* of a receive: -1 until a header has told */
  _Atomic int64_t left;  /* of a send: pieces that the kernel has not taken */
  _Atomic int64_t got;   /* of a receive: bytes copied */
} request_t;

/* A piece on its way between a connection's two actors. */
typedef struct {
  unsigned char *block; /* NULL: a record without a body */
  request_t *request;   /* of a send; NULL: the record that closes */
  header_t header;
  const unsigned char *body;
  unsigned char sealed_header[SEALED_HEADER_SIZE];
  uint64_t record;
} piece_t;

typedef struct {
  communicator_t *communicator;
  int socket;
  watch_t watch;
  actor_t mover;  /* writes what is sealed; reads what is to be opened */
  actor_t sealer; /* seals; or opens */
  direction_t headers, bodies, back; /* back: the other way, in which only the end is said */
  piece_t ring[RING]; /* sealer -> mover, or mover -> sealer */
  _Atomic uint64_t filled, emptied;
  atomic_bool stalled; /* who fills waits for room */
  atomic_bool early;   /* a receive: what came waits for its irecv */
  uint64_t records, back_records;
  size_t moved;        /* a send: bytes of the first piece that are out; a receive: of the present header, or body, that are in */
  size_t back_moved;   /* a send: bytes that came back */
  bool header_known, said_close;
  unsigned char header_bytes[SEALED_HEADER_SIZE];
  header_t header;
  unsigned char *block;      /* a receive: where the present body goes */
  atomic_bool close_written; /* a send: the record that closes is with the kernel */
  bool peer_closed;          /* a send: the receiver has said that it closes */
} connection_t;

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
  pthread_mutex_t lock; /* a send: what is to be sealed next */
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

ncclResult_t request_test(request_t *request, int *done, int *size);

/* Sending (sending.c). */
ncclResult_t send_begin(communicator_t *communicator, void *data, int size, request_t **request);
bool send_run_sealer(actor_t *actor, worker_t *worker);
bool send_run_mover(actor_t *actor, worker_t *worker);

/* Receiving (receiving.c). */
ncclResult_t receive_begin(communicator_t *communicator, void *data, int size, request_t **request);
bool receive_run_opener(actor_t *actor, worker_t *worker);
bool receive_run_mover(actor_t *actor, worker_t *worker);

#endif
