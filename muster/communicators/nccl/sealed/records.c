#include "records.h"

#include <limits.h>
#include <openssl/crypto.h>
#include <stdatomic.h>
#include <string.h>

#include "handshake.h"

static void put_32(unsigned char bytes[4], uint32_t value) {
  for (int i = 0; i < 4; i++) bytes[i] = (unsigned char)(value >> (8 * i));
}

static uint32_t get_32(const unsigned char bytes[4]) {
  return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
}

bool header_seal(direction_t *direction, uint64_t record, const header_t *header, unsigned char *sealed) {
  unsigned char plain[HEADER_SIZE];
  put_64(plain, header->message);
  put_32(plain + 8, header->offset);
  put_32(plain + 12, header->length);
  put_32(plain + 16, header->total);
  put_32(plain + 20, header->kind);
#ifdef MUSTER_PLAIN_FOR_BENCH
  (void)direction, (void)record;
  memcpy(sealed, plain, sizeof plain);
  return true;
#else
  return direction_seal(direction, record, PART_HEADER, plain, sizeof plain, sealed);
#endif
}

bool header_open(direction_t *direction, uint64_t record, const unsigned char *sealed, header_t *header) {
  unsigned char plain[HEADER_SIZE];
#ifdef MUSTER_PLAIN_FOR_BENCH
  (void)direction, (void)record;
  memcpy(plain, sealed, sizeof plain);
#else
  if (!direction_open(direction, record, PART_HEADER, sealed, sizeof plain, plain)) return false;
#endif
  header->message = get_64(plain);
  header->offset = get_32(plain + 8);
  header->length = get_32(plain + 12);
  header->total = get_32(plain + 16);
  header->kind = (record_kind)get_32(plain + 20);
  if (header->kind == RECORD_CLOSE) return header->length == 0;
  return header->kind == RECORD_DATA && header->length <= PIECE_SIZE && header->total <= INT_MAX &&
         (header->length > 0) == (header->total > 0) && (uint64_t)header->offset + header->length <= header->total;
}

enum { LINE = 64, AHEAD = 1024 };

typedef long long sixteen_t __attribute__((vector_size(16), aligned(1), may_alias));

/* The processor must not let a later store be seen before an earlier one. x86 never does. */
static inline void order_stores(void) {
#if !defined(__x86_64__)
  atomic_thread_fence(memory_order_release);
#endif
}

void copy_ascending(unsigned char *to, const unsigned char *from, size_t size) {
  size_t at = 0;
  while (at + 16 <= size) {
    /* The lines of the cache that come next are asked for while these are written: half again as fast. */
    if (size - at > AHEAD) __builtin_prefetch(to + at + AHEAD, 1);
    for (size_t line_end = at + LINE; at < line_end && at + 16 <= size; at += 16) {
      if ((((uintptr_t)to + at) & 127) == 112) order_stores(); /* LL128: the flag is in the last bytes of a line of 128 */
      *(volatile sixteen_t *)(to + at) = *(const sixteen_t *)(from + at); /* LL: data and flag are in the same 8 bytes */
    }
  }
  order_stores();
  for (; at < size; at++) ((volatile unsigned char *)to)[at] = from[at];
}
