/* Measures one way over loopback between two processes, and writes one line of JSON.
 *
 *   loopback bandwidth LIBRARY CONNECTIONS BYTES SECONDS     messages through the plug-in, IN_FLIGHT at once
 *   loopback bandwidth bare    CONNECTIONS BYTES SECONDS     a thread and a TCP connection for each part, nothing else
 *   loopback latency   LIBRARY|bare CONNECTIONS BYTES SECONDS     there and back, half of it
 *
 * The receiver counts, from its first message to its last; an empty message ends it. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "nccl_net.h"

enum { IN_FLIGHT = 8, MAX_ROUNDS = 200000, MAX_CONNECTIONS = 16 };
static const double WARM_UP_S = 0.2;
static int connections, to_peer, from_peer;
static size_t size;
static double seconds;
static unsigned char *buffers[IN_FLIGHT];
static const ncclNet_v8_t *net;
static bool sends;

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

__attribute__((format(printf, 1, 2), noreturn)) static void die(const char *format, ...) {
  va_list values;
  va_start(values, format);
  vfprintf(stderr, format, values);
  va_end(values);
  fprintf(stderr, "\n");
  exit(1);
}

static double processor_s(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
         1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

static void tell(const void *data, size_t count) {
  if (write(to_peer, data, count) != (ssize_t)count) die("the other process is gone");
}

static void hear(void *data, size_t count) {
  for (size_t got = 0; got < count;) {
    ssize_t more = read(from_peer, (char *)data + got, count - got);
    if (more <= 0) die("the other process is gone");
    got += (size_t)more;
  }
}

/* The plug-in's own word, which names the OpenSSL that it runs with: the loader may have found another than Python's. */
static const char *no_plugin(void) { return ""; }
static const char *(*plugin)(void) = no_plugin;

static void report_bandwidth(double bytes, double time, double processor) {
  double peer_processor;
  hear(&peer_processor, sizeof peer_processor);
  printf("{\"gb_per_s\": %.4f, \"bytes\": %.0f, \"seconds\": %.4f, \"sender_cpu_s\": %.3f, \"receiver_cpu_s\": %.3f, "
         "\"plugin\": \"%s\"}\n",
         bytes / time / 1e9, bytes, time, peer_processor, processor, plugin());
}

static int compare(const void *one, const void *other) {
  double a = *(const double *)one, b = *(const double *)other;
  return (a > b) - (a < b);
}

static void report_latency(double *rounds, int count) {
  qsort(rounds, (size_t)count, sizeof *rounds, compare);
  printf("{\"us\": %.3f, \"p90_us\": %.3f, \"rounds\": %d}\n", rounds[count / 2] * 5e5, rounds[count * 9 / 10] * 5e5, count);
}

/* ---------------------------------------------------------------- the plug-in */

__attribute__((format(printf, 5, 6))) static void log_line(int level, unsigned long flags, const char *file, int line,
                                                           const char *format, ...) {
  (void)flags, (void)file, (void)line;
  if (level > NCCL_LEVEL_WARN) return;
  va_list values;
  va_start(values, format);
  vfprintf(stderr, format, values);
  va_end(values);
  fprintf(stderr, "\n");
}

static void good(ncclResult_t result, const char *what) {
  if (result != ncclSuccess) die("%s answers %d", what, (int)result);
}

static void load(const char *library) {
  void *loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (loaded == NULL) die("%s", dlerror());
  int (*use_secret)(uint64_t, const unsigned char *);
  *(void **)&use_secret = dlsym(loaded, "muster_nccl_use_secret");
  net = dlsym(loaded, "ncclNetPlugin_v8");
  *(void **)&plugin = dlsym(loaded, "muster_nccl_version");
  static const unsigned char secret[32] = {1, 2, 3};
  if (net == NULL || plugin == NULL || use_secret == NULL || use_secret(1, secret) != 0) die("%s is not the plug-in", library);
  good(net->init(log_line), "init");
}

static void *meet_as_receiver(void) {
  unsigned char handle[NCCL_HANDLE_SIZE];
  void *listener, *communicator = NULL, *device;
  good(net->listen(0, handle, &listener), "listen");
  tell(handle, sizeof handle);
  while (communicator == NULL) good(net->accept(listener, &communicator, &device), "accept");
  return communicator;
}

static void *meet_as_sender(void) {
  unsigned char handle[NCCL_HANDLE_SIZE];
  void *communicator = NULL, *device;
  hear(handle, sizeof handle);
  while (communicator == NULL) good(net->connect(0, handle, &communicator, &device), "connect");
  return communicator;
}

static void *begin_send(void *communicator, void *data, size_t count) {
  void *request = NULL;
  while (request == NULL) good(net->isend(communicator, data, (int)count, 0, NULL, &request), "isend");
  return request;
}

static void *begin_receive(void *communicator, void *data) {
  void *request = NULL, *handle = NULL;
  int most = (int)size, tag = 0;
  while (request == NULL) good(net->irecv(communicator, 1, &data, &most, &tag, &handle, &request), "irecv");
  return request;
}

static size_t wait_for(void *request) {
  int done = 0, got = 0;
  for (;;) {
    good(net->test(request, &done, &got), "test");
    if (done) return (size_t)got;
    sched_yield();
  }
}

static void plugin_send(void) {
  void *communicator = meet_as_sender(), *requests[IN_FLIGHT] = {NULL};
  double until = now() + WARM_UP_S + seconds;
  for (int at = 0; now() < until; at = (at + 1) % IN_FLIGHT) {
    if (requests[at] != NULL) wait_for(requests[at]);
    requests[at] = begin_send(communicator, buffers[at], size);
  }
  for (int i = 0; i < IN_FLIGHT; i++) {
    if (requests[i] != NULL) wait_for(requests[i]);
  }
  wait_for(begin_send(communicator, buffers[0], 0));
  double processor = processor_s();
  tell(&processor, sizeof processor);
  net->closeSend(communicator);
}

static void plugin_receive(void) {
  void *communicator = meet_as_receiver(), *requests[IN_FLIGHT];
  for (int i = 0; i < IN_FLIGHT; i++) requests[i] = begin_receive(communicator, buffers[i]);
  double began = now(), first = 0, last = 0, bytes = 0, processor = 0;
  for (int at = 0;; at = (at + 1) % IN_FLIGHT) {
    size_t got = wait_for(requests[at]);
    if (got == 0) break;
    last = now();
    if (first == 0 && last - began > WARM_UP_S) {
      first = last;
      processor = processor_s();
    } else if (first != 0) {
      bytes += (double)got;
    }
    requests[at] = begin_receive(communicator, buffers[at]);
  }
  processor = processor_s() - processor;
  net->closeRecv(communicator);
  report_bandwidth(bytes, last - first, processor);
}

static void plugin_latency(void) {
  static double rounds[MAX_ROUNDS];
  void *there = sends ? meet_as_sender() : meet_as_receiver();
  void *back = sends ? meet_as_receiver() : meet_as_sender();
  double until = now() + seconds;
  int count = 0;
  if (!sends) {
    while (wait_for(begin_receive(there, buffers[0])) > 0) wait_for(begin_send(back, buffers[1], size));
    net->closeRecv(there);
    net->closeSend(back);
    return;
  }
  while (count < MAX_ROUNDS && now() < until) {
    double began = now();
    void *answer = begin_receive(back, buffers[1]);
    wait_for(begin_send(there, buffers[0], size));
    wait_for(answer);
    rounds[count++] = now() - began;
  }
  wait_for(begin_send(there, buffers[0], 0));
  report_latency(rounds, count);
  net->closeSend(there);
  net->closeRecv(back);
}

/* ---------------------------------------------------------------- nothing but TCP */

static int sockets[MAX_CONNECTIONS];

static void bare_meet(void) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  int on = 1;
  if (!sends) {
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&address, length) != 0 || listen(listener, 64) != 0) die("listen");
    getsockname(listener, (struct sockaddr *)&address, &length);
    tell(&address.sin_port, sizeof address.sin_port);
    for (int i = 0; i < connections; i++) sockets[i] = accept(listener, NULL, NULL);
  } else {
    hear(&address.sin_port, sizeof address.sin_port);
    for (int i = 0; i < connections; i++) {
      sockets[i] = socket(AF_INET, SOCK_STREAM, 0);
      if (connect(sockets[i], (struct sockaddr *)&address, sizeof address) != 0) die("connect");
    }
  }
  for (int i = 0; i < connections; i++) setsockopt(sockets[i], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/* All `count` bytes; false at the end of the stream. */
static bool bare_move(int socket, unsigned char *data, size_t count, bool out) {
  for (size_t done = 0; done < count;) {
    ssize_t moved = out ? send(socket, data + done, count - done, MSG_NOSIGNAL)
                        : recv(socket, data + done, count - done, MSG_WAITALL);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) return false;
    done += (size_t)moved;
  }
  return true;
}

static _Atomic double bare_began, bare_bytes[MAX_CONNECTIONS], bare_first[MAX_CONNECTIONS], bare_last[MAX_CONNECTIONS];

/* One connection's part of every message. */
static void *bare_part(void *argument) {
  int number = *(int *)argument;
  size_t part = size / (size_t)connections;
  double until = now() + WARM_UP_S + seconds;
  for (int at = 0;; at = (at + 1) % IN_FLIGHT) {
    double time = now();
    if (sends && time > until) break;
    if (!bare_move(sockets[number], buffers[at] + part * (size_t)number, part, sends)) break;
    time = now();
    if (bare_first[number] == 0) {
      if (time - bare_began > WARM_UP_S) bare_first[number] = time;
    } else {
      bare_bytes[number] = bare_bytes[number] + (double)part;
      bare_last[number] = time;
    }
  }
  if (sends) shutdown(sockets[number], SHUT_WR);
  return NULL;
}

static void bare_bandwidth(void) {
  pthread_t threads[MAX_CONNECTIONS];
  int numbers[MAX_CONNECTIONS];
  bare_began = now();
  for (int i = 0; i < connections; i++) {
    numbers[i] = i;
    pthread_create(&threads[i], NULL, bare_part, &numbers[i]);
  }
  for (int i = 0; i < connections; i++) pthread_join(threads[i], NULL);
  double processor = processor_s();
  if (sends) {
    tell(&processor, sizeof processor);
    return;
  }
  double rate = 0;
  for (int i = 0; i < connections; i++) rate += bare_bytes[i] / (bare_last[i] - bare_first[i]);
  report_bandwidth(rate * seconds, seconds, processor);
}

static void bare_latency(void) {
  static double rounds[MAX_ROUNDS];
  double until = now() + seconds;
  int count = 0;
  if (!sends) {
    while (bare_move(sockets[0], buffers[0], size, false) && bare_move(sockets[0], buffers[0], size, true)) {
    }
    return;
  }
  while (count < MAX_ROUNDS && now() < until) {
    double began = now();
    if (!bare_move(sockets[0], buffers[0], size, true) || !bare_move(sockets[0], buffers[0], size, false)) break;
    rounds[count++] = now() - began;
  }
  report_latency(rounds, count);
}

/* ---------------------------------------------------------------- both */

static void measure(bool latency, const char *library) {
  bool bare = strcmp(library, "bare") == 0;
  for (int i = 0; i < IN_FLIGHT; i++) {
    buffers[i] = aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    memset(buffers[i], 0x5a + i, size);
  }
  if (bare) bare_meet();
  else load(library);
  if (latency) bare ? bare_latency() : plugin_latency();
  else if (bare) bare_bandwidth();
  else sends ? plugin_send() : plugin_receive();
}

int main(int count, char **words) {
  if (count != 6) die("loopback bandwidth|latency LIBRARY|bare CONNECTIONS BYTES SECONDS");
  connections = atoi(words[3]);
  size = (size_t)atol(words[4]);
  seconds = atof(words[5]);
  if (connections < 1 || connections > MAX_CONNECTIONS) die("1 to 16 connections");
  setenv("MS_NCCL_CONNECTIONS", words[3], 1);
  setenv("NCCL_SOCKET_IFNAME", "=lo", 1);
  setenv("NCCL_SOCKET_FAMILY", "AF_INET", 1);
  int down[2], up[2];
  if (pipe(down) != 0 || pipe(up) != 0) die("pipe");
  pid_t child = fork();
  sends = child == 0;
  to_peer = sends ? up[1] : down[1];
  from_peer = sends ? down[0] : up[0];
  close(sends ? up[0] : down[0]);
  close(sends ? down[1] : up[1]);
  alarm((unsigned)(seconds + 30)); /* whatever happens, it ends */
  measure(strcmp(words[1], "latency") == 0, words[2]);
  fflush(stdout);
  int status = 0;
  if (!sends && (waitpid(child, &status, 0) != child || status != 0)) return 1;
  return 0;
}
