#define _GNU_SOURCE
#include "communicator.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/crypto.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "errors.h"

enum { CLOSE_PATIENCE_S = 2 };

/* A peer's host that is gone is noticed by an idle connection after 10 + 3 * 5 s. There is no TCP_USER_TIMEOUT: that would
 * also end a connection whose receiver is alive and only asks for nothing, as a rank does that works longer than the others. */
static void set_options(int socket) {
  int on = 1, idle_s = 10, between_s = 5, count = 3;
  (void)setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  (void)setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  (void)setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
  (void)setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &between_s, sizeof between_s);
  (void)setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  struct timeval wait = {.tv_usec = WAIT_US}; /* of calls without MSG_DONTWAIT: see pool_may_wait */
  (void)setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait);
  (void)setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait);
  int flags = fcntl(socket, F_GETFL);
  (void)fcntl(socket, F_SETFL, flags & ~O_NONBLOCK);
}

/* ---------------------------------------------------------------- begin and end */

static bool begin_connection(communicator_t *communicator, connection_t *connection, handshake_t *handshake) {
  bool sends = communicator->sends;
  const unsigned char *data = handshake->dialer_sends, *back = handshake->listener_sends;
  connection->communicator = communicator;
  connection->socket = handshake->socket;
  handshake->socket = -1;
  set_options(connection->socket);
  actor_begin(&connection->mover, sends ? send_run_mover : receive_run_mover);
  actor_begin(&connection->sealer, sends ? send_run_sealer : receive_run_opener);
  return direction_begin(&connection->headers, handshake->cipher, data, sends) &&
         direction_begin(&connection->bodies, handshake->cipher, data, sends) &&
         direction_begin(&connection->back, handshake->cipher, back, !sends);
}

static void end_connection(connection_t *connection) {
  if (connection->communicator == NULL) return;
  watch_end(&connection->watch);
  (void)shutdown(connection->socket, SHUT_RD); /* who waits in recv for a moment comes back at once */
  actor_stop(&connection->mover);
  actor_stop(&connection->sealer);
  close(connection->socket);
  direction_end(&connection->headers);
  direction_end(&connection->bodies);
  direction_end(&connection->back);
  block_give(connection->block);
  for (uint64_t at = atomic_load(&connection->emptied); at < atomic_load(&connection->filled); at++) {
    block_give(connection->ring[at % RING].block);
  }
}

static void end(communicator_t *communicator) {
  for (int i = 0; i < communicator->count; i++) end_connection(&communicator->connections[i]);
  pthread_mutex_destroy(&communicator->lock);
  pthread_cond_destroy(&communicator->written);
  OPENSSL_cleanse(communicator, sizeof *communicator);
  free(communicator);
}

communicator_t *communicator_begin(bool sends, int count, handshake_t *const handshakes[]) {
  communicator_t *communicator = calloc(1, sizeof *communicator);
  if (communicator == NULL) {
    reason_say("NCCL's encrypted connection with %s cannot begin: no memory is left on this host; give the job more.",
               handshakes[0]->peer_text);
    return NULL;
  }
  communicator->sends = sends;
  communicator->count = count;
  snprintf(communicator->peer, sizeof communicator->peer, "%s", handshakes[0]->peer_text);
  pthread_mutex_init(&communicator->lock, NULL);
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(&communicator->written, &attributes);
  pthread_condattr_destroy(&attributes);
  bool good = true;
  for (int i = 0; good && i < count; i++) {
    good = begin_connection(communicator, &communicator->connections[i], handshakes[i]);
  }
  for (int i = 0; good && i < count; i++) { /* only now: whichever runs first may end them all */
    connection_t *connection = &communicator->connections[i];
    good = watch_begin(&connection->watch, connection->socket, &connection->mover);
  }
  if (good) return communicator;
  reason_say("NCCL's encrypted connection with %s cannot begin: no memory, descriptor or cipher is left for it on this host; "
             "look at its limits (ulimit -n).", handshakes[0]->peer_text);
  atomic_store(&communicator->ending, true);
  end(communicator);
  return NULL;
}

void communicator_fail(communicator_t *communicator, ncclResult_t result, const char *format, ...) {
  char text[REASON_SIZE - ADDRESS_TEXT_SIZE - 64];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  bool idle = atomic_load(&communicator->open_requests) == 0; /* a job's end may look like that */
  pthread_mutex_lock(&communicator->lock);
  bool first = atomic_load(&communicator->error) == 0;
  if (first) {
    snprintf(communicator->why, sizeof communicator->why, "NCCL's encrypted connection with %s has ended: %s.",
             communicator->peer, text);
    /* Said before the error can be seen: NCCL, once it has seen it, takes the last warning. */
    if (!atomic_load(&communicator->ending)) (idle ? reason_note : reason_say)("%s", communicator->why);
    atomic_store(&communicator->unsaid, idle);
    atomic_store(&communicator->error, (int)result);
    pthread_cond_broadcast(&communicator->written);
  }
  pthread_mutex_unlock(&communicator->lock);
  if (!first) return;
  for (int i = 0; i < communicator->count; i++) (void)shutdown(communicator->connections[i].socket, SHUT_RDWR);
}

ncclResult_t communicator_error(communicator_t *communicator) {
  int error = atomic_load(&communicator->error);
  if (error != 0 && atomic_exchange(&communicator->unsaid, false)) reason_say("%s", communicator->why);
  return (ncclResult_t)error;
}

/* ---------------------------------------------------------------- close */

static bool all_written(const communicator_t *communicator) {
  for (int i = 0; i < communicator->count; i++) {
    if (!atomic_load(&communicator->connections[i].close_written)) return false;
  }
  return true;
}

/* The sender's end: a last record on each connection, for which it waits a moment. */
static void say_close(communicator_t *communicator) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += CLOSE_PATIENCE_S;
  for (int i = 0; i < communicator->count; i++) {
    connection_t *connection = &communicator->connections[i];
    if (actor_run_here(&connection->sealer, NULL)) (void)actor_run_here(&connection->mover, NULL);
  }
  pthread_mutex_lock(&communicator->lock);
  while (!all_written(communicator) && atomic_load(&communicator->error) == 0) {
    if (pthread_cond_timedwait(&communicator->written, &communicator->lock, &until) != 0) break;
  }
  pthread_mutex_unlock(&communicator->lock);
}

/* The receiver's end. Nothing else was ever sent that way, so there is room for it. */
static void say_close_back(connection_t *connection) {
  unsigned char bytes[SEALED_HEADER_SIZE];
  header_t header = {.kind = RECORD_CLOSE};
  if (header_seal(&connection->back, connection->back_records++, &header, bytes)) {
    (void)send(connection->socket, bytes, sizeof bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
}

void communicator_close(communicator_t *communicator) {
  if (communicator == NULL) return;
  bool orderly = atomic_load(&communicator->error) == 0 && atomic_load(&communicator->open_requests) == 0 && !pool_has_ended();
  atomic_store(&communicator->ending, true);
  if (orderly && communicator->sends && !atomic_load(&communicator->peer_gone)) say_close(communicator);
  if (orderly && !communicator->sends) {
    for (int i = 0; i < communicator->count; i++) say_close_back(&communicator->connections[i]);
  }
  if (!orderly) { /* an abort: who waits for the rest must hear of it */
    for (int i = 0; i < communicator->count; i++) (void)shutdown(communicator->connections[i].socket, SHUT_RDWR);
  }
  end(communicator);
}

/* ---------------------------------------------------------------- requests */

request_t *request_open(communicator_t *communicator, void *data, int size) {
  uint64_t message = atomic_load(&communicator->posted);
  request_t *request = &communicator->requests[message % NCCL_MAX_REQUESTS];
  if (atomic_load(&request->open)) return NULL;
  request->communicator = communicator;
  request->message = message;
  request->data = data;
  request->size = size;
  atomic_store(&request->total, -1);
  atomic_store(&request->got, 0);
  int64_t pieces = size == 0 ? 1 : ((int64_t)size + PIECE_SIZE - 1) / PIECE_SIZE;
  atomic_store(&request->left, pieces);
  atomic_store(&request->open, true);
  atomic_fetch_add(&communicator->open_requests, 1);
  return request;
}

ncclResult_t request_test(request_t *request, int *done, int *size) {
  communicator_t *communicator = request->communicator;
  *done = 0;
  if (!atomic_load(&request->open)) return ncclInternalError;
  /* First what has ended the whole, then the request: so that the last pieces before an orderly end still count. */
  ncclResult_t error = communicator_error(communicator);
  bool closed = !communicator->sends && atomic_load(&communicator->closed) == communicator->count;
  int64_t total = communicator->sends ? request->size : atomic_load(&request->total);
  bool complete = communicator->sends ? atomic_load(&request->left) == 0 : total >= 0 && atomic_load(&request->got) == total;
  if (complete) {
    if (size != NULL) *size = (int)total;
    atomic_store(&request->open, false);
    atomic_fetch_sub(&communicator->open_requests, 1);
    *done = 1;
    return ncclSuccess;
  }
  if (error == ncclSuccess && closed) {
    communicator_fail(communicator, ncclRemoteError,
                      "the peer has closed it while data were still to come; look at its log for why it left");
    error = communicator_error(communicator);
  }
  return error;
}
