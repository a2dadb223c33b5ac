#define _GNU_SOURCE
#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "errors.h"
#include "handle.h"
#include "meeting.h"
#include "secret.h"

enum { ATTEMPTS = 4 };
static const int64_t RETRY_NS = 100000000; /* after the first; then twice as long each time */

/* A connect that has begun. Found again by where NCCL keeps the handle and which listener it names, not by anything in the handle
 * itself: that came over the network. */
typedef struct dial dial_t;
struct dial {
  dial_t *next;
  const void *handle;
  unsigned char listener[ID_SIZE];
  struct sockaddr_storage address;
  uint64_t generation;
  int64_t deadline_ns, asked_ns;
  int count;
  hello_t hello;
  int attempts[MAX_CONNECTIONS];
  int64_t retry_ns[MAX_CONNECTIONS]; /* 0: under way */
  handshake_t connections[MAX_CONNECTIONS];
};

static pthread_mutex_t dials_lock = PTHREAD_MUTEX_INITIALIZER;
static dial_t *dials;

static void end_dial(dial_t *dial) {
  for (int i = 0; i < dial->count; i++) handshake_end(&dial->connections[i]);
  OPENSSL_cleanse(dial, sizeof *dial);
  free(dial);
}

/* Takes a dial out of the table; those that nobody has asked for any more go with it. NULL: a new one. */
static dial_t *take_dial(const void *handle, const unsigned char listener[ID_SIZE], int64_t now) {
  dial_t *found = NULL;
  pthread_mutex_lock(&dials_lock);
  for (dial_t **at = &dials; *at != NULL;) {
    dial_t *dial = *at;
    bool same = dial->handle == handle && memcmp(dial->listener, listener, ID_SIZE) == 0;
    bool forgotten = !same && (dial->handle == handle || now > dial->deadline_ns + RETRY_NS * 50);
    if (!same && !forgotten) {
      at = &dial->next;
      continue;
    }
    *at = dial->next;
    if (same) found = dial;
    else end_dial(dial);
  }
  pthread_mutex_unlock(&dials_lock);
  return found;
}

static void keep_dial(dial_t *dial) {
  pthread_mutex_lock(&dials_lock);
  dial->next = dials;
  dials = dial;
  pthread_mutex_unlock(&dials_lock);
}

static void dial_connection(dial_t *dial, int number) {
  hello_t hello = dial->hello;
  hello.connection = (unsigned char)number;
  dial->attempts[number]++;
  dial->retry_ns[number] = 0;
  handshake_dial(&dial->connections[number], &dial->address, dial->generation, &hello, dial->deadline_ns);
}

static ncclResult_t begin_dial(const interface_t *interface, const meeting_settings_t *settings, const void *handle,
                               int64_t now, dial_t **result) {
  dial_t *dial = calloc(1, sizeof *dial);
  if (dial == NULL) return ncclSystemError;
  unsigned char secret[MUSTER_NCCL_SECRET_SIZE];
  char peer[ADDRESS_TEXT_SIZE];
  uint64_t held;
  (void)handle_read(handle, interface->name, &dial->generation, dial->listener, &dial->address);
  address_text(&dial->address, peer);
  bool holds = secret_of(dial->generation, secret, &held);
  OPENSSL_cleanse(secret, sizeof secret);
  if (!holds || RAND_bytes(dial->hello.communicator, ID_SIZE) != 1) {
    reason_say("NCCL's network does not connect to %s: it is of generation %llu and this process of %llu; the older one has "
               "to join its job again.", peer, (unsigned long long)dial->generation, (unsigned long long)held);
    free(dial);
    return ncclRemoteError;
  }
  dial->handle = handle;
  dial->deadline_ns = now + settings->patience_ns;
  dial->count = settings->connections;
  memcpy(dial->hello.listener, dial->listener, ID_SIZE);
  dial->hello.connections = (unsigned char)dial->count;
  for (int i = 0; i < dial->count; i++) dial_connection(dial, i);
  *result = dial;
  return ncclSuccess;
}

/* Goes on with one connection; NULL, or the handshake that failed for good.
 *
 * One that ended before the other side said a word is tried again a few times: the listener may have put it out in favour
 * of a stranger, while this hello was on its way. */
static const handshake_t *go_on(dial_t *dial, int number, int64_t now) {
  handshake_t *connection = &dial->connections[number];
  if (dial->retry_ns[number] != 0) {
    if (now >= dial->retry_ns[number]) dial_connection(dial, number);
    return NULL;
  }
  handshake_go_on(connection, NULL, now);
  if (connection->step != STEP_FAILED) return NULL;
  if (!connection->may_retry || dial->attempts[number] >= ATTEMPTS) return connection;
  handshake_end(connection);
  dial->retry_ns[number] = now + (RETRY_NS << (dial->attempts[number] - 1));
  return NULL;
}

ncclResult_t dialer_connect(const interface_t *interface, const meeting_settings_t *settings, const void *handle,
                            communicator_t **communicator) {
  *communicator = NULL;
  uint64_t generation;
  unsigned char listener[ID_SIZE];
  struct sockaddr_storage address;
  if (!handle_read(handle, interface->name, &generation, listener, &address)) {
    reason_say("NCCL's network does not connect: what came over NCCL's bootstrap is no handle of Muster's; turn encryption on "
               "for all ranks, or for none.");
    return ncclRemoteError;
  }
  int64_t now = now_ns();
  dial_t *dial = take_dial(handle, listener, now);
  if (dial == NULL) {
    ncclResult_t result = begin_dial(interface, settings, handle, now, &dial);
    if (result != ncclSuccess) return result;
  }
  int done = 0;
  for (int i = 0; i < dial->count; i++) {
    const handshake_t *failed = go_on(dial, i, now);
    if (failed != NULL) {
      reason_say("NCCL's network does not connect to %s: %s.", failed->peer_text, failed->failure);
      end_dial(dial);
      return ncclRemoteError;
    }
    if (dial->retry_ns[i] == 0 && dial->connections[i].step == STEP_DONE) done++;
  }
  if (done < dial->count) {
    keep_dial(dial);
    return ncclSuccess;
  }
  handshake_t *connections[MAX_CONNECTIONS];
  for (int i = 0; i < dial->count; i++) connections[i] = &dial->connections[i];
  *communicator = communicator_begin(true, dial->count, connections);
  end_dial(dial);
  return *communicator != NULL ? ncclSuccess : ncclSystemError;
}
