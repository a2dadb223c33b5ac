#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <time.h>

#include "communicator.h"
#include "errors.h"

#define CONNECTION_OF(actor, member) ((connection_t *)(void *)((char *)(actor) - offsetof(connection_t, member)))

enum { ENOUGH = 2 };

static const char ALTERED[] =
    "what came on it was altered on the way, or is not from this generation's member; look at what stands between the two hosts";

/* ---------------------------------------------------------------- what is opened */

/* The receive that a record is for; NULL where there is none yet. *wrong says that there never will be. */
static request_t *request_of(communicator_t *communicator, const header_t *header, bool *wrong) {
  *wrong = false;
  if (atomic_load(&communicator->posted) <= header->message) return NULL;
  request_t *request = &communicator->requests[header->message % NCCL_MAX_REQUESTS];
  if (!atomic_load(&request->open) || request->message != header->message) {
    *wrong = true;
    communicator_fail(communicator, ncclRemoteError, "the peer sent a message twice; use the same version of Muster on both hosts");
  } else if (header->total > (uint32_t)request->size) {
    *wrong = true;
    communicator_fail(communicator, ncclInvalidUsage,
                      "the peer sent %u bytes where this rank receives at most %d; let all ranks call the same collectives "
                      "with the same sizes", header->total, request->size);
  }
  return *wrong ? NULL : request;
}

/* Counts bytes that lie where they belong. Nobody here touches the request afterwards: it may be done. */
static void deliver(request_t *request, const header_t *header) {
  atomic_store(&request->total, (int64_t)header->total);
  atomic_fetch_add(&request->got, (int64_t)header->length);
}

/* Opens one piece into the thread's own block, and copies it to the user only once it is verified. */
static bool open_piece(connection_t *connection, piece_t *piece, request_t *request, worker_t *worker) {
  size_t length = piece->header.length;
  if (length > 0 && SEALED) {
    if (!direction_open(&connection->bodies, piece->record, PART_BODY, piece->block, length, worker->private_block)) return false;
    copy_ascending(request->data + piece->header.offset, worker->private_block, length);
  }
  block_give(piece->block);
  piece->block = NULL;
  deliver(request, &piece->header);
  return true;
}

bool receive_run_opener(actor_t *actor, worker_t *worker) {
  connection_t *connection = CONNECTION_OF(actor, sealer);
  communicator_t *communicator = connection->communicator;
  for (int i = 0; i < RUN_PIECES; i++) {
    if (atomic_load(&communicator->error) != 0 || atomic_load(&communicator->ending)) return false;
    uint64_t emptied = atomic_load(&connection->emptied);
    if (emptied == atomic_load(&connection->filled)) return false;
    piece_t *piece = &connection->ring[emptied % RING];
    if (piece->header.kind == RECORD_CLOSE) {
      atomic_fetch_add(&communicator->closed, 1);
      atomic_store(&connection->emptied, emptied + 1);
      return false;
    }
    bool wrong;
    request_t *request = request_of(communicator, &piece->header, &wrong);
    if (request == NULL && !wrong) {
      atomic_exchange(&connection->early, true);
      request = request_of(communicator, &piece->header, &wrong);
      if (request == NULL && !wrong) return false; /* irecv wakes it */
      atomic_exchange(&connection->early, false);
    }
    if (wrong) return false;
    if (!open_piece(connection, piece, request, worker)) {
      communicator_fail(communicator, ncclRemoteError, "%s", ALTERED);
      return false;
    }
    atomic_store(&connection->emptied, ++emptied);
    if (atomic_load(&connection->filled) - emptied <= RING / 2 && atomic_exchange(&connection->stalled, false)) {
      actor_wake(&connection->mover);
    }
  }
  return true;
}

/* ---------------------------------------------------------------- what is read */

typedef enum { READ_SOME, READ_NOTHING, READ_END } read_result;

/* Reads into up to two places. Where nothing is there and data are expected it waits a moment, if a thread is to spare. */
static read_result read_some(connection_t *connection, struct iovec parts[2], worker_t *worker, size_t *got) {
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = parts[1].iov_len > 0 ? 2 : 1};
  ssize_t count;
  do {
    count = recvmsg(connection->socket, &message, MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  bool nothing = count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  if (nothing && atomic_load(&connection->filled) != atomic_load(&connection->emptied)) {
    (void)actor_run_here(&connection->sealer, worker);
  }
  if (nothing && atomic_load(&connection->communicator->open_requests) > 0 && pool_may_wait(worker)) {
    message.msg_iovlen = 1;
    count = recvmsg(connection->socket, &message, connection->header_known ? MSG_WAITALL : 0);
    int error = errno;
    pool_has_waited();
    errno = error;
    nothing = count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR);
  }
  *got = count > 0 ? (size_t)count : 0;
  if (count == 0) errno = 0;
  if (count > 0) return READ_SOME;
  return nothing ? READ_NOTHING : READ_END;
}

static void at_end(connection_t *connection, int error) {
  communicator_fail(connection->communicator, ncclRemoteError,
                    "it was cut, or the peer's process died (%s); look at that process's log and at the network",
                    error == 0 ? "the stream ended without the sealed record that closes it" : strerror(error));
}

/* Hands a whole record to the opener, which is woken when ENOUGH wait for it. What is less waits until nothing more is to be
 * read, and is then opened by this thread: to wake another takes as long as to open a block. */
static void hand_over(connection_t *connection, uint64_t record) {
  uint64_t filled = atomic_load(&connection->filled);
  connection->ring[filled % RING] = (piece_t){.block = connection->block, .header = connection->header, .record = record};
  connection->block = NULL;
  connection->header_known = false;
  atomic_store(&connection->filled, filled + 1);
  if (!SEALED) (void)actor_run_here(&connection->sealer, NULL); /* it only counts what has come */
  else if (filled + 1 - atomic_load(&connection->emptied) >= ENOUGH) actor_wake(&connection->sealer);
}

/* Whether there is room for another record; if not, the opener wakes the mover later. */
static bool has_room(connection_t *connection) {
  uint64_t filled = atomic_load(&connection->filled);
  if (filled - atomic_load(&connection->emptied) < RING) return true;
  atomic_exchange(&connection->stalled, true);
  if (filled - atomic_load(&connection->emptied) == RING) return false;
  atomic_exchange(&connection->stalled, false);
  return true;
}

/* Opens a header that has come in whole. False where nothing more is to be read now. */
static bool take_header(connection_t *connection) {
  if (!header_open(&connection->headers, connection->records, connection->header_bytes, &connection->header)) {
    communicator_fail(connection->communicator, ncclRemoteError, "%s", ALTERED);
    return false;
  }
  connection->header_known = true;
  connection->moved = 0;
  if (connection->header.kind == RECORD_CLOSE) {
    connection->said_close = true;
    return true;
  }
#ifndef MUSTER_PLAIN_FOR_BENCH
  if (connection->header.length > 0 && (connection->block = block_take()) == NULL) {
    communicator_fail(connection->communicator, ncclSystemError, "no memory is left on this host; give the job more");
    return false;
  }
#endif
  return true;
}

/* Where the rest of the present record goes: [0] what is due, [1] the header after it, read in the same call.
 * False where it has to wait for its irecv (plain alone: sealed bodies go into a block of their own). */
static bool place(connection_t *connection, struct iovec parts[2]) {
  parts[1].iov_len = 0;
  if (!connection->header_known) {
    parts[0] = (struct iovec){connection->header_bytes + connection->moved, SEALED_HEADER_SIZE - connection->moved};
    return true;
  }
  unsigned char *to = connection->block;
#ifdef MUSTER_PLAIN_FOR_BENCH
  bool wrong;
  request_t *request = request_of(connection->communicator, &connection->header, &wrong);
  if (request == NULL && !wrong) {
    atomic_exchange(&connection->early, true);
    request = request_of(connection->communicator, &connection->header, &wrong);
    if (request != NULL) atomic_exchange(&connection->early, false);
  }
  if (request == NULL) return false;
  to = request->data + connection->header.offset;
#endif
  parts[0] = (struct iovec){to + connection->moved, body_size(&connection->header) - connection->moved};
  parts[1] = (struct iovec){connection->header_bytes, SEALED_HEADER_SIZE};
  return true;
}

bool receive_run_mover(actor_t *actor, worker_t *worker) {
  connection_t *connection = CONNECTION_OF(actor, mover);
  communicator_t *communicator = connection->communicator;
  atomic_exchange(&connection->watch.events, 0);
  for (int i = 0; i < 4 * RUN_PIECES; i++) {
    if (atomic_load(&communicator->error) != 0 || atomic_load(&communicator->ending)) return false;
    if (!connection->header_known && connection->said_close) return false;
    if (!has_room(connection)) {
      actor_wake(&connection->sealer);
      return false;
    }
    size_t due = connection->header_known ? body_size(&connection->header) : SEALED_HEADER_SIZE;
    if (connection->moved < due) {
      struct iovec parts[2];
      size_t got;
      if (!place(connection, parts)) return false;
      switch (read_some(connection, parts, worker, &got)) {
        case READ_SOME:
          connection->moved += got;
          break;
        case READ_NOTHING:
          watch_arm(&connection->watch, EPOLLIN);
          return false;
        case READ_END:
          at_end(connection, errno);
          return false;
      }
    }
    if (connection->moved < due) continue;
    if (!connection->header_known && !take_header(connection)) return false;
    due = connection->header_known ? body_size(&connection->header) : SEALED_HEADER_SIZE;
    if (connection->moved < due) continue;
    size_t beyond = connection->moved - due; /* of the next record's header */
    hand_over(connection, connection->records++);
    connection->moved = beyond;
    if (connection->said_close) actor_wake(&connection->sealer);
  }
  return true;
}

/* ---------------------------------------------------------------- irecv */

ncclResult_t receive_begin(communicator_t *communicator, void *data, int size, request_t **request) {
  ncclResult_t error = communicator_error(communicator);
  *request = NULL;
  if (error != ncclSuccess) return error;
  request_t *opened = request_open(communicator, data, size);
  if (opened == NULL) return ncclSuccess; /* NCCL asks again */
  atomic_fetch_add(&communicator->posted, 1);
  for (int i = 0; i < communicator->count; i++) {
    connection_t *connection = &communicator->connections[i];
    if (!atomic_exchange(&connection->early, false)) continue;
    if (!SEALED) actor_wake(&connection->mover); /* it waits with bodies; the opener with records that have none */
    actor_wake(&connection->sealer);
  }
  *request = opened;
  return ncclSuccess;
}
