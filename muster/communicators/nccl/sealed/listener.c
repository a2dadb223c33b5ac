#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "errors.h"
#include "handle.h"
#include "meeting.h"
#include "secret.h"

enum { MAX_GUESTS = 64, BACKLOG = 128, ACCEPTS_AT_ONCE = 64, REFUSALS_LOGGED = 10 };
static const int64_t HELLO_NS = 5000000000, FINISH_NS = 10000000000;

struct listener {
  int socket;
  uint64_t generation;
  unsigned char id[ID_SIZE];
  int64_t begun_ns, patience_ns; /* begun: 0 until accept is first called */
  uint64_t arrivals, refused;
  char last_refusal[ADDRESS_TEXT_SIZE + 256]; /* of who said something */
  char text[ADDRESS_TEXT_SIZE];
  handshake_t *guests[MAX_GUESTS];
};

ncclResult_t listener_begin(const interface_t *interface, const meeting_settings_t *settings, void *handle,
                            listener_t **result) {
  *result = NULL;
  uint64_t generation;
  if (!secret_find(&generation)) return ncclInvalidUsage;
  listener_t *listener = calloc(1, sizeof *listener);
  if (listener == NULL) return ncclSystemError;
  listener->generation = generation;
  listener->patience_ns = settings->patience_ns;
  struct sockaddr_storage address = interface->address;
  socklen_t size = address_size(&address);
  if (address.ss_family == AF_INET) ((struct sockaddr_in *)&address)->sin_port = 0;
  else ((struct sockaddr_in6 *)&address)->sin6_port = 0;
  listener->socket = socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (listener->socket < 0 || bind(listener->socket, (struct sockaddr *)&address, size) != 0 ||
      listen(listener->socket, BACKLOG) != 0 || getsockname(listener->socket, (struct sockaddr *)&address, &size) != 0 ||
      RAND_bytes(listener->id, ID_SIZE) != 1) {
    reason_say("NCCL's network cannot listen on interface %s (%s); look at its address, and allow this process more "
               "descriptors (ulimit -n).", interface->name, strerror(errno));
    if (listener->socket >= 0) close(listener->socket);
    free(listener);
    return ncclSystemError;
  }
  address_text(&address, listener->text);
  handle_write(handle, generation, listener->id, &address);
  *result = listener;
  return ncclSuccess;
}

static void dismiss(listener_t *listener, int place) {
  handshake_end(listener->guests[place]);
  free(listener->guests[place]);
  listener->guests[place] = NULL;
}

/* A free place, if need be that of the oldest who has proved nothing, or else who has not finished; -1 if all have. */
static int make_place(listener_t *listener) {
  int oldest[2] = {-1, -1};
  for (int i = 0; i < MAX_GUESTS; i++) {
    const handshake_t *guest = listener->guests[i];
    if (guest == NULL) return i;
    if (guest->step == STEP_DONE) continue;
    int *best = &oldest[guest->proved ? 1 : 0];
    if (*best < 0 || guest->arrival < listener->guests[*best]->arrival) *best = i;
  }
  int place = oldest[0] >= 0 ? oldest[0] : oldest[1];
  if (place >= 0) {
    listener->refused++;
    dismiss(listener, place);
  }
  return place;
}

/* Goes on with one guest; one that has failed goes. */
static void attend(listener_t *listener, int place, int64_t now) {
  handshake_t *guest = listener->guests[place];
  bool proved = guest->proved;
  handshake_go_on(guest, listener->id, now);
  if (!proved && guest->proved) guest->deadline_ns = now + FINISH_NS;
  if (guest->step == STEP_DONE) guest->deadline_ns = now + listener->patience_ns;
  if (guest->step != STEP_FAILED) return;
  snprintf(listener->last_refusal, sizeof listener->last_refusal, "%s: %s", guest->peer_text, guest->failure);
  if (listener->refused++ < REFUSALS_LOGGED) log_note("refused %s", listener->last_refusal);
  dismiss(listener, place);
}

static void let_in(listener_t *listener, int64_t now) {
  for (int i = 0; i < ACCEPTS_AT_ONCE; i++) {
    struct sockaddr_storage peer;
    memset(&peer, 0, sizeof peer);
    socklen_t size = sizeof peer;
    int socket = accept4(listener->socket, (struct sockaddr *)&peer, &size, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) return; /* nobody, or no descriptor: those of guests become free */
    int place = make_place(listener);
    handshake_t *guest = place < 0 ? NULL : calloc(1, sizeof *guest);
    if (guest == NULL) {
      close(socket);
      return;
    }
    handshake_receive(guest, socket, &peer, listener->generation, now + HELLO_NS);
    guest->arrival = listener->arrivals++;
    listener->guests[place] = guest;
    attend(listener, place, now); /* its hello may be here already: then nobody puts it out */
  }
}

/* Finds all connections of one communicator, in their order; how many places that are, 0 where some are missing. */
static int complete_set(const listener_t *listener, const handshake_t *one, int places[MAX_CONNECTIONS]) {
  int found = 0;
  for (int i = 0; i < MAX_CONNECTIONS; i++) places[i] = -1;
  for (int i = 0; i < MAX_GUESTS; i++) {
    const handshake_t *guest = listener->guests[i];
    if (guest == NULL || guest->step != STEP_DONE || guest->hello.connections != one->hello.connections) continue;
    if (memcmp(guest->hello.communicator, one->hello.communicator, ID_SIZE) != 0) continue;
    if (places[guest->hello.connection] < 0) found++;
    places[guest->hello.connection] = i;
  }
  return found == one->hello.connections ? found : 0;
}

static ncclResult_t time_out(const listener_t *listener, int64_t now) {
  if (now - listener->begun_ns <= listener->patience_ns) return ncclSuccess;
  long long seconds = (long long)(listener->patience_ns / 1000000000);
  if (listener->last_refusal[0] != '\0') {
    reason_say("NCCL's network at %s waited %lld s for its peer and refused others (%llu), the last %s.", listener->text,
               seconds, (unsigned long long)listener->refused, listener->last_refusal);
  } else {
    reason_say("NCCL's network at %s waited %lld s for its peer and nobody came; look whether the other rank's process is "
               "alive, at the firewalls between the hosts, and at MS_NCCL_ACCEPT_TIMEOUT.", listener->text, seconds);
  }
  return ncclRemoteError;
}

ncclResult_t listener_accept(listener_t *listener, communicator_t **communicator) {
  *communicator = NULL;
  int64_t now = now_ns();
  if (listener->begun_ns == 0) listener->begun_ns = now;
  for (int i = 0; i < MAX_GUESTS; i++) {
    if (listener->guests[i] != NULL) attend(listener, i, now);
  }
  let_in(listener, now);
  for (int i = 0; i < MAX_GUESTS; i++) {
    int places[MAX_CONNECTIONS];
    handshake_t *guest = listener->guests[i], *set[MAX_CONNECTIONS];
    int count = guest != NULL && guest->step == STEP_DONE ? complete_set(listener, guest, places) : 0;
    if (count == 0) continue;
    for (int j = 0; j < count; j++) set[j] = listener->guests[places[j]];
    *communicator = communicator_begin(false, count, set);
    for (int j = 0; j < count; j++) dismiss(listener, places[j]);
    return *communicator != NULL ? ncclSuccess : ncclSystemError;
  }
  return time_out(listener, now);
}

void listener_end(listener_t *listener) {
  if (listener == NULL) return;
  for (int i = 0; i < MAX_GUESTS; i++) {
    if (listener->guests[i] != NULL) dismiss(listener, i);
  }
  close(listener->socket);
  free(listener);
}
