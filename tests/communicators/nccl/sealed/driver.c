/* Calls the plug-in's table as NCCL does, told by lines on its standard input; answers each with one line.
 *
 * Tests start two of these and let them speak with each other. Every wait has an end. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "muster_nccl.h"
#include "nccl_net.h"

enum { PLACES = 512, PATIENCE_S = 60 };
extern const ncclNet_v8_t ncclNetPlugin_v8;
static const ncclNet_v8_t *net = &ncclNetPlugin_v8;
static void *listeners[PLACES], *communicators[PLACES];
static int sends[PLACES];
static int count_listeners, count_communicators;
typedef struct {
  void *request;
  unsigned char *data;
  int size;
} posted_t;
static posted_t posted[PLACES];
static int count_posted;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void pause_a_little(void) {
  struct timespec time = {.tv_nsec = 50000};
  nanosleep(&time, NULL);
}

__attribute__((format(printf, 1, 2))) static void answer(const char *format, ...) {
  va_list values;
  va_start(values, format);
  vprintf(format, values);
  va_end(values);
  printf("\n");
  fflush(stdout);
}

static void answer_result(ncclResult_t result) {
  char reason[600];
  muster_nccl_reason(reason, sizeof reason);
  if (result == ncclSuccess) answer("ok");
  else answer("error %d %s", (int)result, reason);
}

__attribute__((format(printf, 5, 6))) static void log_line(int level, unsigned long flags, const char *file, int line,
                                                           const char *format, ...) {
  (void)flags, (void)file, (void)line;
  va_list values;
  va_start(values, format);
  fprintf(stderr, "%s ", level == NCCL_LEVEL_WARN ? "WARN" : "INFO");
  vfprintf(stderr, format, values);
  fprintf(stderr, "\n");
  va_end(values);
}

/* What message `seed` holds. Number 0 is one pattern again and again, to be looked for on the wire. */
static void fill(unsigned char *data, int size, unsigned seed) {
  static const unsigned char pattern[] = "gradient that nobody else reads.";
  for (int i = 0; seed == 0 && i < size; i++) data[i] = pattern[i % 32];
  if (seed == 0) return;
  unsigned long long state = seed * 2654435761ULL + 12345;
  for (int i = 0; i < size; i += 8) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    unsigned long long mixed = state ^ state >> 29;
    memcpy(data + i, &mixed, size - i < 8 ? (size_t)(size - i) : 8);
  }
}

static int from_hex(const char *text, unsigned char *bytes, int most) {
  int count = 0;
  unsigned value;
  while (count < most && sscanf(text + 2 * count, "%2x", &value) == 1) bytes[count++] = (unsigned char)value;
  return count;
}

static void command_listen(int device) {
  unsigned char handle[NCCL_HANDLE_SIZE];
  ncclResult_t result = net->listen(device, handle, &listeners[count_listeners]);
  if (result != ncclSuccess) {
    answer_result(result);
    return;
  }
  printf("listener %d ", count_listeners++);
  for (int i = 0; i < NCCL_HANDLE_SIZE; i++) printf("%02x", handle[i]);
  answer("%s", "");
}

/* Accepts, or connects where there is a handle. */
static void command_meet(int listener, const char *hex, double patience) {
  unsigned char handle[NCCL_HANDLE_SIZE];
  if (hex != NULL && from_hex(hex, handle, NCCL_HANDLE_SIZE) != NCCL_HANDLE_SIZE) {
    answer("error 4 no handle");
    return;
  }
  void *communicator = NULL, *device = NULL;
  double until = now() + patience;
  while (communicator == NULL && now() < until) {
    ncclResult_t result = hex != NULL ? net->connect(0, handle, &communicator, &device)
                                      : net->accept(listeners[listener], &communicator, &device);
    if (result != ncclSuccess) {
      answer_result(result);
      return;
    }
    if (communicator == NULL) pause_a_little();
  }
  if (communicator == NULL) {
    answer("nobody");
    return;
  }
  sends[count_communicators] = hex != NULL;
  communicators[count_communicators] = communicator;
  answer("communicator %d", count_communicators++);
}

/* Begins one request; NULL where there are 32 of them. */
static ncclResult_t post(int number, unsigned char *data, int size, void **request) {
  int tag = 0;
  void *address = data, *mhandle = NULL;
  if (sends[number]) return net->isend(communicators[number], data, size, tag, NULL, request);
  return net->irecv(communicators[number], 1, &address, &size, &tag, &mhandle, request);
}

typedef struct {
  unsigned char *data;
  void *request;
  int index;
} slot_t;

static int is_wrong(const unsigned char *data, int got, int size, unsigned seed) {
  unsigned char *wanted = malloc((size_t)size + 1);
  fill(wanted, size, seed);
  int wrong = got != size || memcmp(wanted, data, (size_t)size) != 0;
  free(wanted);
  return wrong;
}

/* Sends or receives `count` messages with up to `flight` at once; a receiver compares each byte.
 * Message i is of `size` + i * `step` bytes; a receiver asks for `room` more. */
static void command_move(int number, int size, int step, int count, int flight, int room, unsigned seed) {
  slot_t slots[NCCL_MAX_REQUESTS] = {0};
  int begun = 0, done = 0, most = size + step * count + room + 1;
  ncclResult_t result = ncclSuccess;
  double until = now() + PATIENCE_S;
  const char *wrong = NULL;
  for (int i = 0; i < flight; i++) slots[i].data = malloc((size_t)most);
  while (done < count && result == ncclSuccess && wrong == NULL && now() < until) {
    int before = begun + done;
    for (int i = 0; i < flight && result == ncclSuccess && wrong == NULL; i++) {
      slot_t *slot = &slots[i];
      if (slot->request == NULL && begun < count && begun % flight == i) {
        int exact = size + step * begun;
        if (sends[number]) fill(slot->data, exact, seed + (unsigned)begun);
        else memset(slot->data, 0, (size_t)most);
        result = post(number, slot->data, sends[number] ? exact : exact + room, &slot->request);
        if (slot->request != NULL) slot->index = begun++;
      } else if (slot->request != NULL) {
        int finished = 0, got = -1;
        result = net->test(slot->request, &finished, &got);
        if (!finished) continue;
        int exact = size + step * slot->index;
        if (!sends[number] && is_wrong(slot->data, got, exact, seed + (unsigned)slot->index)) wrong = "data differ";
        slot->request = NULL;
        done++;
      }
    }
    if (begun + done == before) pause_a_little();
  }
  if (wrong != NULL) answer("wrong %s", wrong);
  else if (result == ncclSuccess && done < count) answer("hangs after %d of %d", done, count);
  else answer_result(result);
  if (done == count) {
    for (int i = 0; i < flight; i++) free(slots[i].data);
  } else { /* the library may still use them: until close, by which the program must not have freed them */
    for (int i = 0; i < flight; i++) posted[count_posted++ % PLACES].data = slots[i].data;
  }
}

/* Begins `count` requests and goes on to the next line. */
static void command_post(int number, int size, int count, unsigned seed) {
  ncclResult_t result = ncclSuccess;
  int begun = 0;
  for (; begun < count && result == ncclSuccess; begun++) {
    posted_t *one = &posted[count_posted % PLACES];
    one->data = malloc((size_t)size + 1);
    one->size = size;
    fill(one->data, size, seed + (unsigned)begun);
    result = post(number, one->data, size, &one->request);
    if (one->request == NULL) {
      free(one->data);
      one->data = NULL;
      break;
    }
    count_posted++;
  }
  if (result == ncclSuccess) answer("posted %d", begun);
  else answer_result(result);
}

/* Tests the oldest begun requests until one fails or `seconds` are over. */
static void command_wait(double seconds) {
  double until = now() + seconds;
  int done = 0;
  for (int i = 0; i < count_posted; i++) {
    while (posted[i].request != NULL) {
      int finished = 0, got = 0;
      ncclResult_t result = net->test(posted[i].request, &finished, &got);
      if (result != ncclSuccess) {
        answer_result(result);
        return;
      }
      if (finished) {
        posted[i].request = NULL;
        done++;
      } else if (now() > until) {
        answer("waits after %d", done);
        return;
      } else {
        pause_a_little();
      }
    }
  }
  answer("done %d", done);
}

/* Tests none of the begun requests any more. Their memory stays until the end. */
static void command_abandon(void) {
  for (int i = 0; i < count_posted; i++) posted[i].request = NULL;
  answer("ok");
}

static void command_devices(void) {
  int count = 0;
  net->devices(&count);
  printf("devices %d", count);
  for (int i = 0; i < count; i++) {
    ncclNetProperties_v8_t properties;
    net->getProperties(i, &properties);
    printf(" %s/%d/%d", properties.name, properties.speed, properties.ptrSupport);
  }
  answer("%s", "");
}

static void command_say(const char *what) {
  char text[600];
  if (strcmp(what, "reason") == 0) {
    muster_nccl_reason(text, sizeof text);
    answer("%s", text);
  } else if (strcmp(what, "forget") == 0) {
    muster_nccl_forget_reason();
    answer("ok");
  } else if (strcmp(what, "version") == 0) {
    answer("%s", muster_nccl_version());
  } else if (strcmp(what, "self-test") == 0) {
    int result = muster_nccl_self_test(text, sizeof text);
    answer("%d %s", result, text);
  } else {
    answer("unknown");
  }
}

static void command_secret(unsigned long long generation, const char *hex) {
  unsigned char secret[MUSTER_NCCL_SECRET_SIZE];
  int size = from_hex(hex, secret, sizeof secret);
  answer("%d", muster_nccl_use_secret(generation, size == MUSTER_NCCL_SECRET_SIZE ? secret : NULL));
}

static void command_close(int number) {
  net->closeSend(communicators[number]);
  communicators[number] = NULL;
  answer("ok");
}

static void obey(const char *line) {
  int a = 0, b = 0, c = 0, d = 0, e = 0, f = 0;
  unsigned seed = 0;
  double seconds = 0;
  unsigned long long generation = 0;
  char text[400];
  if (sscanf(line, "secret %llu %399s", &generation, text) == 2) command_secret(generation, text);
  else if (strcmp(line, "init") == 0) answer_result(net->init(log_line));
  else if (sscanf(line, "listen %d", &a) == 1) command_listen(a);
  else if (sscanf(line, "accept %d %lf", &a, &seconds) == 2) command_meet(a, NULL, seconds);
  else if (sscanf(line, "connect %399s %lf", text, &seconds) == 2) command_meet(0, text, seconds);
  else if (sscanf(line, "move %d %d %d %d %d %d %u", &a, &b, &c, &d, &e, &f, &seed) == 7) command_move(a, b, c, d, e, f, seed);
  else if (sscanf(line, "post %d %d %d %u", &a, &b, &c, &seed) == 4) command_post(a, b, c, seed);
  else if (sscanf(line, "wait %lf", &seconds) == 1) command_wait(seconds);
  else if (sscanf(line, "close %d", &a) == 1) command_close(a);
  else if (sscanf(line, "unlisten %d", &a) == 1) answer_result(net->closeListen(listeners[a]));
  else if (strcmp(line, "devices") == 0) command_devices();
  else if (strcmp(line, "abandon") == 0) command_abandon();
  else command_say(line);
}

int main(void) {
  static char line[1024];
  while (fgets(line, sizeof line, stdin) != NULL) {
    line[strcspn(line, "\n")] = '\0';
    obey(line);
  }
  for (int i = 0; i < count_communicators; i++) net->closeSend(communicators[i]);
  for (int i = 0; i < PLACES; i++) free(posted[i].data);
  return 0;
}
