#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <time.h>

#include "communicator.h"
#include "errors.h"

/* ---------------------------------------------------------------- what is to be sealed */

/* Takes the next piece of the oldest message that is not all sealed: whichever connection has room takes it. At the end, what
 * is taken is the record that closes. *more: there is another piece. */
static bool take_piece(lane_t *lane, bool *more) {
  connection_t *connection = lane->connection;
  communicator_t *communicator = connection->communicator;
  pthread_mutex_lock(&communicator->lock);
  bool some = communicator->to_seal < atomic_load(&communicator->posted);
  if (some) {
    request_t *request = &communicator->requests[communicator->to_seal % NCCL_MAX_REQUESTS];
    uint64_t left = (uint64_t)request->size - communicator->sealed_up_to;
    uint32_t length = (uint32_t)(left < (uint64_t)request->piece ? left : (uint64_t)request->piece);
    lane->request = request;
    lane->header = (header_t){.message = request->message,
                              .offset = (uint32_t)communicator->sealed_up_to,
                              .length = length,
                              .total = (uint32_t)request->size,
                              .kind = RECORD_DATA};
    lane->body = request->data + communicator->sealed_up_to;
    communicator->sealed_up_to += length;
    if (communicator->sealed_up_to == (uint64_t)request->size) {
      communicator->to_seal++;
      communicator->sealed_up_to = 0;
    }
  } else if (atomic_load(&communicator->ending) && !atomic_exchange(&connection->said_close, true)) {
    lane->request = NULL;
    lane->header = (header_t){.kind = RECORD_CLOSE};
    some = true;
  }
  if (some) lane->record = connection->records++;
  *more = communicator->to_seal < atomic_load(&communicator->posted);
  pthread_mutex_unlock(&communicator->lock);
  return some;
}

/* Seals a piece straight from the user's memory. NULL, or what is wrong. */
static const char *seal(lane_t *lane) {
  static const char broken[] = "libcrypto does not seal; repair OpenSSL on this host";
  if (!header_seal(&lane->direction, lane->record, &lane->header, lane->sealed_header)) return broken;
#ifndef MUSTER_PLAIN_FOR_BENCH
  if (lane->header.length > 0) {
    if (lane->block == NULL) lane->block = block_take();
    if (lane->block == NULL) return "no memory is left on this host; give the job more";
    if (!direction_seal(&lane->direction, lane->record, PART_BODY, lane->body, lane->header.length, lane->block)) return broken;
    lane->body = lane->block;
  }
#endif
  return NULL;
}

/* Fills the lane with the next record. False where there is none, or it cannot be sealed. */
static bool fill(lane_t *lane) {
  bool more;
  if (!take_piece(lane, &more)) return false;
  if (more && lane_needs_help(lane) && !atomic_load(&lane->connection->was_full)) actor_wake(&other_lane(lane)->actor);
  const char *wrong = seal(lane);
  if (wrong != NULL) {
    communicator_fail(lane->connection->communicator, ncclSystemError, "%s", wrong);
    return false;
  }
  lane->moved = 0;
  atomic_store(&lane->full, true);
  return true;
}

/* ---------------------------------------------------------------- what is to be written */

/* Waits for what comes back and, where a lane is blocked, for room in the socket. */
static void arm(connection_t *connection, lane_t *blocked) {
  communicator_t *communicator = connection->communicator;
  pthread_mutex_lock(&communicator->lock);
  if (blocked != NULL) connection->blocked = blocked;
  uint32_t events = connection->blocked != NULL ? EPOLLOUT : 0;
  if (!atomic_load(&communicator->ending)) events |= EPOLLIN;
  if (events != 0) watch_arm(&connection->watch, events);
  pthread_mutex_unlock(&communicator->lock);
}

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
      arm(connection, NULL);
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

bool send_run_watcher(actor_t *actor, bool of_pool) {
  connection_t *connection = HOLDER_OF(connection_t, watcher, actor);
  communicator_t *communicator = connection->communicator;
  uint32_t events = atomic_exchange(&connection->watch.events, 0);
  int broken = atomic_exchange(&connection->broken, 0);
  if (atomic_load(&communicator->error) != 0) return false;
  pthread_mutex_lock(&communicator->lock);
  lane_t *blocked = connection->blocked;
  if (events != 0) connection->blocked = NULL;
  pthread_mutex_unlock(&communicator->lock);
  if (broken != 0 || events & ~(uint32_t)EPOLLOUT) look_for_end(connection);
  else if (events != 0) arm(connection, NULL);
  if (broken != 0) { /* what the peer said at its end says more than the broken pipe */
    communicator_fail(communicator, ncclRemoteError,
                      "it was cut, or the peer's process died (%s); look at that process's log and at the network",
                      strerror(broken));
  }
  if (events != 0 && blocked != NULL) (void)actor_run_here(&blocked->actor, of_pool);
  return false;
}

/* ---------------------------------------------------------------- what is written */

/* Whether it is this lane's turn to send. If not, the other one wakes it. */
static bool has_turn(lane_t *lane) {
  connection_t *connection = lane->connection;
  if (atomic_load(&connection->sent) == lane->record) return true;
  atomic_store(&lane->waits, true);
  if (atomic_load(&connection->sent) != lane->record) return false;
  atomic_store(&lane->waits, false);
  return true;
}

/* Counts the lane's record as taken by the kernel. Its request may be done, and used again, from then on. */
static void written(lane_t *lane) {
  connection_t *connection = lane->connection;
  communicator_t *communicator = connection->communicator;
  if (lane->request != NULL) {
    atomic_fetch_sub(&lane->request->left, 1);
  } else {
    (void)shutdown(connection->socket, SHUT_WR);
    pthread_mutex_lock(&communicator->lock);
    atomic_store(&connection->close_written, true);
    pthread_cond_broadcast(&communicator->written);
    pthread_mutex_unlock(&communicator->lock);
  }
  atomic_store(&lane->full, false);
  atomic_fetch_add(&connection->sent, 1);
  lane_t *other = other_lane(lane);
  if (atomic_exchange(&other->waits, false)) actor_wake(&other->actor);
}

/* Writes what is left of the lane's record, once; waits a moment for room if a thread is to spare. */
static ssize_t write_some(lane_t *lane, bool of_pool) {
  connection_t *connection = lane->connection;
  size_t in_header = lane->moved < SEALED_HEADER_SIZE ? SEALED_HEADER_SIZE - lane->moved : 0;
  size_t in_body = lane->moved + in_header - SEALED_HEADER_SIZE, length = body_size(&lane->header);
  struct iovec parts[2] = {{lane->sealed_header + lane->moved, in_header},
                           {(void *)(uintptr_t)(lane->body + in_body), length - in_body}};
  if (in_header == 0) parts[0] = parts[1];
  struct msghdr message = {.msg_iov = parts, .msg_iovlen = in_header == 0 || length == 0 ? 1 : 2};
  ssize_t sent = sendmsg(connection->socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  atomic_store(&connection->was_full, sent < (ssize_t)(in_header + length - in_body));
  if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) && pool_may_wait(of_pool)) {
    sent = sendmsg(connection->socket, &message, MSG_NOSIGNAL);
    int error = errno;
    pool_has_waited();
    errno = error;
  }
  return sent;
}

/* Sends the lane's record. False where that has to wait, or fails. */
static bool send_record(lane_t *lane, bool of_pool) {
  connection_t *connection = lane->connection;
  size_t whole = SEALED_HEADER_SIZE + body_size(&lane->header);
  while (lane->moved < whole) {
    ssize_t sent = write_some(lane, of_pool);
    if (sent >= 0) {
      lane->moved += (size_t)sent;
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      arm(connection, lane);
      return false;
    } else if (errno != EINTR) {
      atomic_store(&connection->broken, errno);
      actor_wake(&connection->watcher);
      return false;
    }
  }
  written(lane);
  return true;
}

/* Whether the other lane is enough: it comes to the next piece after its own, and the receiver is slower than one lane. */
static bool is_needless(lane_t *lane) { return atomic_load(&lane->connection->was_full) && atomic_load(&other_lane(lane)->full); }

bool send_run_lane(actor_t *actor, bool of_pool) {
  lane_t *lane = HOLDER_OF(lane_t, actor, actor);
  for (int i = 0; i < RUN_PIECES; i++) {
    if (atomic_load(&lane->connection->communicator->error) != 0) return false;
    if (!atomic_load(&lane->full) && (is_needless(lane) || !fill(lane))) {
      block_give(lane->block);
      lane->block = NULL;
      return false;
    }
    if (!has_turn(lane) || !send_record(lane, of_pool)) return false;
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
      actor_wake(&connection->lanes[0].actor);
    } else { /* a thread would take longer to wake */
      (void)actor_run_here(&connection->lanes[0].actor, false);
    }
  }
  return ncclSuccess;
}
