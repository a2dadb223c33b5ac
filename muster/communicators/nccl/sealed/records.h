/* What goes over a connection after its handshake: records, each a sealed header and a sealed body.
 *
 *   header: 24 bytes (message's number, place and length of this piece, the message's length, kind), then a tag
 *   body:   the piece's bytes, then a tag; absent where there are none
 *
 * Both are sealed under the record's number in its direction, so a record that is altered, repeated, left out, moved or
 * taken from another connection does not open. The header has a tag of its own because it says how much is to be read. */
#ifndef MUSTER_RECORDS_H
#define MUSTER_RECORDS_H

#include <stdbool.h>

#include "keys.h"
#include "pool.h"

#ifdef MUSTER_PLAIN_FOR_BENCH
enum { SEALED = 0, OVERHEAD = 0 };
#else
enum { SEALED = 1, OVERHEAD = TAG_SIZE };
#endif
enum { PIECE_SIZE = BLOCK_BODY, HEADER_SIZE = 24, SEALED_HEADER_SIZE = HEADER_SIZE + OVERHEAD };

typedef enum { RECORD_DATA = 1, RECORD_CLOSE = 2 } record_kind;

typedef struct {
  uint64_t message; /* 0, 1, 2, ... of the communicator */
  uint32_t offset, length, total;
  record_kind kind;
} header_t;

/* Writes SEALED_HEADER_SIZE bytes. */
bool header_seal(direction_t *direction, uint64_t record, const header_t *header, unsigned char *sealed);

/* Reads them. False where they do not open, or say what cannot be. */
bool header_open(direction_t *direction, uint64_t record, const unsigned char *sealed, header_t *header);

/* The body's bytes on the wire. */
static inline size_t body_size(const header_t *header) { return header->length == 0 ? 0 : (size_t)header->length + OVERHEAD; }

/* Copies in ascending order of address: with its protocols LL and LL128 NCCL's kernels read a flag behind each few bytes
 * of a message while it arrives, and take what stands before a flag that has come as come. memcpy keeps no such order. */
void copy_ascending(unsigned char *to, const unsigned char *from, size_t size);

#endif
