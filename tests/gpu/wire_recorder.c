/* Preloaded into a rank: looks for a pattern in what the process gives to its TCP sockets, before the kernel has it.
 *
 * WIRE_RECORD names a file of 24 bytes that the starter has made: bytes seen, calls seen, calls with the pattern.
 * WIRE_PATTERN is what is looked for. Needs no right to open raw sockets, and misses no packet. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

static _Atomic uint64_t *counts;
static const char *pattern;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void begin(void) {
  const char *path = getenv("WIRE_RECORD");
  pattern = getenv("WIRE_PATTERN");
  int file = path != NULL && pattern != NULL ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *mapped = mmap(NULL, 24, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped != MAP_FAILED) counts = mapped;
}

static int is_tcp(int descriptor) {
  struct sockaddr_storage address;
  socklen_t size = sizeof address;
  int kind = 0;
  socklen_t kind_size = sizeof kind;
  return getsockname(descriptor, (struct sockaddr *)&address, &size) == 0 &&
         (address.ss_family == AF_INET || address.ss_family == AF_INET6) &&
         getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &kind, &kind_size) == 0 && kind == SOCK_STREAM;
}

static void look(int descriptor, const struct iovec *parts, size_t count) {
  pthread_once(&once, begin);
  if (counts == NULL || !is_tcp(descriptor)) return;
  uint64_t bytes = 0;
  int found = 0;
  for (size_t i = 0; i < count; i++) {
    bytes += parts[i].iov_len;
    if (!found && memmem(parts[i].iov_base, parts[i].iov_len, pattern, strlen(pattern)) != NULL) found = 1;
  }
  atomic_fetch_add(&counts[0], bytes);
  atomic_fetch_add(&counts[1], 1);
  if (found) atomic_fetch_add(&counts[2], 1);
}

#define REAL(name) \
  static __typeof__(name) *real; \
  if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, #name)

ssize_t send(int descriptor, const void *data, size_t size, int flags) {
  REAL(send);
  struct iovec part = {(void *)(uintptr_t)data, size};
  look(descriptor, &part, 1);
  return real(descriptor, data, size, flags);
}

ssize_t sendto(int descriptor, const void *data, size_t size, int flags, const struct sockaddr *to, socklen_t length) {
  REAL(sendto);
  struct iovec part = {(void *)(uintptr_t)data, size};
  look(descriptor, &part, 1);
  return real(descriptor, data, size, flags, to, length);
}

ssize_t sendmsg(int descriptor, const struct msghdr *message, int flags) {
  REAL(sendmsg);
  look(descriptor, message->msg_iov, message->msg_iovlen);
  return real(descriptor, message, flags);
}

ssize_t write(int descriptor, const void *data, size_t size) {
  REAL(write);
  struct iovec part = {(void *)(uintptr_t)data, size};
  look(descriptor, &part, 1);
  return real(descriptor, data, size);
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
  REAL(writev);
  look(descriptor, parts, (size_t)count);
  return real(descriptor, parts, count);
}
