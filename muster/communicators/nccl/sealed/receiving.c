#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <time.h>

#include "communicator.h"
#include "errors.h"

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

/* The receive that the lane's record is for; NULL where there is none yet, and irecv wakes it, or where *wrong. */
static request_t *await_request(connection_t *connection, const header_t *header, bool *wrong) {
  request_t *request = request_of(connection->communicator, header, wrong);
  if (request != NULL || *wrong) return request;
  atomic_exchange(&connection->early, true);
  return request_of(connection->communicator, header, wrong);
}

/* Opens the lane's record in its block, and copies it to the user only once it is verified. */
static bool open_body(lane_t *lane, const request_t *request) {
  size_t length = lane->header.length;
  if (!SEALED || length == 0) return true; /* not sealed, it was read to where it belongs */
  if (!direction_open(&lane->direction, lane->record, PART_BODY, lane->block, length, lane->block)) return false;
  copy_ascending(request->data + lane->header.offset, lane->block, length);
  return true;
}

static bool has_turn(const lane_t *lane) { return lane == &lane->connection->lanes[atomic_load(&lane->connection->turn)]; }

/* Leaves the socket to the other lane, if that one can take it. */
static void pass_turn(lane_t *lane) {
  connection_t *connection = lane->connection;
  lane_t *other = other_lane(lane);
  if (!has_turn(lane) || atomic_load(&other->full)) return;
  atomic_store(&connection->turn, (int)(other - connection->lanes));
  actor_wake(&other->actor);
}

/* Puts what the lane has read where it belongs. False where that has to wait, or fails. */
static bool deliver(lane_t *lane) {
  connection_t *connection = lane->connection;
  communicator_t *communicator = connection->communicator;
  if (lane->header.kind == RECORD_CLOSE) {
    if (atomic_load(&connection->opened) == lane->record && atomic_exchange(&lane->full, false)) {
      atomic_fetch_add(&communicator->closed, 1);
    }
    return false;
  }
  bool wrong;
  request_t *request = await_request(connection, &lane->header, &wrong);
  if (request == NULL) {
    if (!wrong) pass_turn(lane);
    return false;
  }
  if (!open_body(lane, request)) {
    communicator_fail(communicator, ncclRemoteError, "%s", ALTERED);
    return false;
  }
  /* Nobody here touches the request after its bytes are counted: it may be done. */
  atomic_store(&request->total, (int64_t)lane->header.total);
  atomic_fetch_add(&request->got, (int64_t)lane->header.length);
  atomic_store(&lane->full, false);
  atomic_fetch_add(&connection->opened, 1);
  if (atomic_load(&connection->said_close)) actor_wake(&other_lane(lane)->actor);
  return true;
}

/* ---------------------------------------------------------------- what is read */

typedef enum { READ_SOME, READ_NOTHING, READ_END } read_result;

/* Reads into up to two places. Where nothing is there and data are expected it waits a moment, if a thread is to spare. */
static read_result read_some(connection_t *connection, struct iovec parts[2], bool of_pool, size_t *got) {
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = parts[1].iov_len > 0 ? 2 : 1};
  ssize_t count;
  do {
    count = recvmsg(connection->socket, &message, MSG_DONTWAIT);
  } while (count < 0 && errno == EINTR);
  bool nothing = count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  if (nothing && atomic_load(&connection->communicator->open_requests) > 0 && pool_may_wait(of_pool)) {
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

/* Opens a header that has come in whole. False where nothing more is to be read now. */
static bool take_header(lane_t *lane) {
  connection_t *connection = lane->connection;
  lane->record = connection->records++;
  if (!header_open(&lane->direction, lane->record, connection->header_bytes, &lane->header)) {
    communicator_fail(connection->communicator, ncclRemoteError, "%s", ALTERED);
    return false;
  }
  connection->header_known = true;
  connection->moved = 0;
  if (lane->header.kind == RECORD_CLOSE) atomic_store(&connection->said_close, true);
#ifndef MUSTER_PLAIN_FOR_BENCH
  if (lane->header.length > 0 && lane->block == NULL && (lane->block = block_take()) == NULL) {
    communicator_fail(connection->communicator, ncclSystemError, "no memory is left on this host; give the job more");
    return false;
  }
#endif
  return true;
}

/* Where the rest of the present record goes: [0] what is due, [1] the header after it, read in the same call.
 * False where it has to wait for its irecv (plain alone: sealed bodies go into a block of their own). */
static bool place(lane_t *lane, struct iovec parts[2]) {
  connection_t *connection = lane->connection;
  parts[1].iov_len = 0;
  if (!connection->header_known) {
    parts[0] = (struct iovec){connection->header_bytes + connection->moved, SEALED_HEADER_SIZE - connection->moved};
    return true;
  }
  unsigned char *to = lane->block;
#ifdef MUSTER_PLAIN_FOR_BENCH
  bool wrong;
  request_t *request = await_request(connection, &lane->header, &wrong);
  if (request == NULL) return false;
  to = request->data + lane->header.offset;
#endif
  parts[0] = (struct iovec){to + connection->moved, body_size(&lane->header) - connection->moved};
  parts[1] = (struct iovec){connection->header_bytes, SEALED_HEADER_SIZE};
  return true;
}

/* Fills the lane with the next record, whose turn it has. False where that has to wait, or there is none. */
static bool fill(lane_t *lane, bool of_pool) {
  connection_t *connection = lane->connection;
  for (;;) {
    size_t due = connection->header_known ? body_size(&lane->header) : SEALED_HEADER_SIZE;
    if (connection->moved >= due && connection->header_known) break;
    if (connection->moved >= due) {
      if (!take_header(lane)) return false;
      continue;
    }
    struct iovec parts[2];
    size_t got;
    if (!place(lane, parts)) return false;
    switch (read_some(connection, parts, of_pool, &got)) {
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
  connection->moved -= body_size(&lane->header); /* what is beyond is of the next record's header */
  connection->header_known = false;
  atomic_store(&lane->full, true);
  return true;
}

bool receive_run_lane(actor_t *actor, bool of_pool) {
  lane_t *lane = HOLDER_OF(lane_t, actor, actor);
  connection_t *connection = lane->connection;
  communicator_t *communicator = connection->communicator;
  for (int i = 0; i < RUN_PIECES; i++) {
    if (atomic_load(&communicator->error) != 0 || atomic_load(&communicator->ending)) return false;
    if (!atomic_load(&lane->full)) {
      bool reads = has_turn(lane) && !atomic_load(&connection->said_close);
      if (!reads || !fill(lane, of_pool)) {
        if (reads && connection->header_known) return false; /* a part of it is in the block */
        block_give(lane->block);
        lane->block = NULL;
        return false;
      }
      if (lane_needs_help(lane) && connection->moved > 0) pass_turn(lane); /* where nothing more is there, one is enough */
    }
    if (!deliver(lane)) return false;
  }
  return true;
}

bool receive_run_watcher(actor_t *actor, bool of_pool) {
  connection_t *connection = HOLDER_OF(connection_t, watcher, actor);
  (void)actor_run_here(&connection->lanes[atomic_load(&connection->turn)].actor, of_pool);
  return false;
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
    for (int j = 0; j < LANES; j++) actor_wake(&connection->lanes[j].actor);
  }
  *request = opened;
  return ncclSuccess;
}
