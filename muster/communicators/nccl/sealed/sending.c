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
enum { AT_ONCE = RING / 2 }; /* pieces of one sendmsg: the sealer fills the other half at the same time */

/* ---------------------------------------------------------------- what is to be sealed */

/* Takes the next piece of the oldest message that is not all sealed: whichever connection has room takes it. */
static bool take_piece(communicator_t *communicator, piece_t *piece) {
  pthread_mutex_lock(&communicator->lock);
  bool some = communicator->to_seal < atomic_load(&communicator->posted);
  if (some) {
    request_t *request = &communicator->requests[communicator->to_seal % NCCL_MAX_REQUESTS];
    uint64_t left = (uint64_t)request->size - communicator->sealed_up_to;
    uint32_t length = (uint32_t)(left < PIECE_SIZE ? left : PIECE_SIZE);
    piece->request = request;
    piece->header = (header_t){.message = request->message,
                               .offset = (uint32_t)communicator->sealed_up_to,
                               .length = length,
                               .total = (uint32_t)request->size,
                               .kind = RECORD_DATA};
    piece->body = request->data + communicator->sealed_up_to;
    communicator->sealed_up_to += length;
    if (communicator->sealed_up_to == (uint64_t)request->size) {
      communicator->to_seal++;
      communicator->sealed_up_to = 0;
    }
  }
  pthread_mutex_unlock(&communicator->lock);
  return some;
}

/* Seals a piece straight from the user's memory. NULL, or what is wrong. */
static const char *seal(connection_t *connection, piece_t *piece) {
  static const char broken[] = "libcrypto does not seal; repair OpenSSL on this host";
  uint64_t record = connection->records++;
  piece->block = NULL;
  if (!header_seal(&connection->headers, record, &piece->header, piece->sealed_header)) return broken;
#ifndef MUSTER_PLAIN_FOR_BENCH
  if (piece->header.length > 0) {
    piece->block = block_take();
    if (piece->block == NULL) return "no memory is left on this host; give the job more";
    if (!direction_seal(&connection->bodies, record, PART_BODY, piece->body, piece->header.length, piece->block)) return broken;
    piece->body = piece->block;
  }
#endif
  return NULL;
}

bool send_run_sealer(actor_t *actor, worker_t *worker) {
  connection_t *connection = CONNECTION_OF(actor, sealer);
  communicator_t *communicator = connection->communicator;
  for (int i = 0; i < RUN_PIECES; i++) {
    if (atomic_load(&communicator->error) != 0 || connection->said_close) return false;
    uint64_t filled = atomic_load(&connection->filled);
    if (filled - atomic_load(&connection->emptied) == RING) {
      atomic_exchange(&connection->stalled, true);
      if (filled - atomic_load(&connection->emptied) == RING) return false; /* the mover wakes it */
      atomic_exchange(&connection->stalled, false);
    }
    piece_t *piece = &connection->ring[filled % RING];
    if (!take_piece(communicator, piece)) {
      if (!atomic_load(&communicator->ending)) return false;
      *piece = (piece_t){.header = {.kind = RECORD_CLOSE}};
      connection->said_close = true;
    }
    const char *wrong = seal(connection, piece);
    if (wrong != NULL) {
      block_give(piece->block);
      communicator_fail(communicator, ncclSystemError, "%s", wrong);
      return false;
    }
    atomic_store(&connection->filled, filled + 1);
    if (worker != NULL) actor_wake(&connection->mover);
  }
  return true;
}

/* ---------------------------------------------------------------- what is to be written */

/* Nothing comes this way but the receiver's close, sealed, and the end of the stream. */
static void look_for_end(connection_t *connection) {
  communicator_t *communicator = connection->communicator;
  while (!atomic_load(&communicator->ending) && atomic_load(&communicator->error) == 0) {
    unsigned char more;
    bool whole = connection->peer_closed;
    void *to = whole ? &more : connection->header_bytes + connection->back_moved;
    ssize_t got = recv(connection->socket, to, whole ? 1 : SEALED_HEADER_SIZE - connection->back_moved, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      watch_arm(&connection->watch, EPOLLIN);
      return;
    }
    if (got > 0 && !whole) {
      connection->back_moved += (size_t)got;
      header_t header;
      if (connection->back_moved < SEALED_HEADER_SIZE) continue;
      if (header_open(&connection->back, connection->back_records++, connection->header_bytes, &header) &&
          header.kind == RECORD_CLOSE) {
        connection->peer_closed = true;
        continue;
      }
    }
    if (got == 0 && whole) {
      atomic_store(&communicator->peer_gone, true);
      if (atomic_load(&communicator->open_requests) > 0) {
        communicator_fail(communicator, ncclRemoteError,
                          "the peer has closed it while data were still to go; look at its log for why it left");
      }
    } else if (got > 0) {
      communicator_fail(communicator, ncclRemoteError,
                        "what came back on it was altered on the way; look at what stands between the two hosts");
    } else {
      communicator_fail(communicator, ncclRemoteError,
                        "it was cut, or the peer's process died (%s); look at that process's log and at the network",
                        got == 0 ? "end of the stream" : strerror(errno));
    }
    return;
  }
}

static size_t wire_size(const piece_t *piece) { return SEALED_HEADER_SIZE + body_size(&piece->header); }

/* Describes what is left of the next pieces, the first of which is partly out; returns how many parts. */
static size_t gather(connection_t *connection, struct iovec parts[2 * AT_ONCE]) {
  uint64_t from = atomic_load(&connection->emptied), to = atomic_load(&connection->filled);
  size_t count = 0, skip = connection->moved;
  for (uint64_t at = from; at < to && at < from + AT_ONCE; at++) {
    piece_t *piece = &connection->ring[at % RING];
    const unsigned char *starts[2] = {piece->sealed_header, piece->body};
    size_t sizes[2] = {SEALED_HEADER_SIZE, body_size(&piece->header)};
    for (int i = 0; i < 2; i++) {
      size_t skipped = skip < sizes[i] ? skip : sizes[i];
      skip -= skipped;
      if (sizes[i] == skipped) continue;
      parts[count++] = (struct iovec){(void *)(uintptr_t)(starts[i] + skipped), sizes[i] - skipped};
    }
  }
  return count;
}

/* Counts `size` bytes as taken by the kernel. The request of a piece may be done, and used again, from then on. */
static void written(connection_t *connection, size_t size) {
  communicator_t *communicator = connection->communicator;
  connection->moved += size;
  uint64_t at = atomic_load(&connection->emptied);
  while (at < atomic_load(&connection->filled)) {
    piece_t *piece = &connection->ring[at % RING];
    size_t whole = wire_size(piece);
    if (connection->moved < whole) break;
    connection->moved -= whole;
    request_t *request = piece->request;
    block_give(piece->block);
    piece->block = NULL;
    if (request != NULL) {
      atomic_fetch_sub(&request->left, 1);
    } else {
      (void)shutdown(connection->socket, SHUT_WR);
      pthread_mutex_lock(&communicator->lock);
      atomic_store(&connection->close_written, true);
      pthread_cond_broadcast(&communicator->written);
      pthread_mutex_unlock(&communicator->lock);
    }
    atomic_store(&connection->emptied, ++at);
  }
  if (atomic_load(&connection->filled) - at <= RING / 2 && atomic_exchange(&connection->stalled, false)) {
    actor_wake(&connection->sealer);
  }
}

static ssize_t write_some(connection_t *connection, struct iovec *parts, size_t count, worker_t *worker) {
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = count};
  ssize_t sent = sendmsg(connection->socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) && pool_may_wait(worker)) {
    sent = sendmsg(connection->socket, &message, MSG_NOSIGNAL);
    int error = errno;
    pool_has_waited();
    errno = error;
  }
  return sent;
}

bool send_run_mover(actor_t *actor, worker_t *worker) {
  connection_t *connection = CONNECTION_OF(actor, mover);
  communicator_t *communicator = connection->communicator;
  uint32_t events = atomic_exchange(&connection->watch.events, 0);
  if (atomic_load(&communicator->error) != 0) return false;
  if (events & ~(uint32_t)EPOLLOUT) look_for_end(connection);
  else if (events != 0) watch_arm(&connection->watch, EPOLLIN);
  for (int i = 0; i < RUN_PIECES; i++) {
    struct iovec parts[2 * AT_ONCE];
    size_t count = gather(connection, parts);
    if (count == 0) return false;
    ssize_t sent = write_some(connection, parts, count, worker);
    if (sent >= 0) {
      written(connection, (size_t)sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      watch_arm(&connection->watch, atomic_load(&communicator->ending) ? EPOLLOUT : EPOLLIN | EPOLLOUT);
      return false;
    } else if (errno != EINTR) {
      int error = errno;
      look_for_end(connection); /* what the peer said at its end says more than the broken pipe */
      communicator_fail(communicator, ncclRemoteError,
                        "it was cut, or the peer's process died (%s); look at that process's log and at the network",
                        strerror(error));
      return false;
    }
  }
  return true;
}

/* ---------------------------------------------------------------- isend */

ncclResult_t send_begin(communicator_t *communicator, void *data, int size, request_t **request) {
  *request = NULL;
  ncclResult_t error = communicator_error(communicator);
  if (error != ncclSuccess) return error;
  if (atomic_load(&communicator->peer_gone)) {
    communicator_fail(communicator, ncclRemoteError,
                      "the peer has closed it while data were still to go; look at its log for why it left");
    return communicator_error(communicator);
  }
  pthread_mutex_lock(&communicator->lock);
  bool pending = communicator->to_seal < atomic_load(&communicator->posted);
  request_t *opened = request_open(communicator, data, size);
  int64_t pieces = opened != NULL ? atomic_load(&opened->left) : 0;
  if (opened != NULL) atomic_fetch_add(&communicator->posted, 1);
  pthread_mutex_unlock(&communicator->lock);
  *request = opened; /* NULL: NCCL asks again */
  for (int64_t i = 0; i < pieces && i < communicator->count; i++) {
    connection_t *connection = &communicator->connections[communicator->next];
    communicator->next = (communicator->next + 1) % communicator->count;
    if (size > SMALL || pending) {
      actor_wake(&connection->sealer);
    } else if (actor_run_here(&connection->sealer, NULL)) { /* a thread would take longer to wake */
      (void)actor_run_here(&connection->mover, NULL);
    }
  }
  return ncclSuccess;
}
