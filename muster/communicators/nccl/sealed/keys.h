/* Keys and ciphers: HKDF-SHA256 (RFC 5869), and one direction of a connection that seals or opens. */
#ifndef MUSTER_KEYS_H
#define MUSTER_KEYS_H

#include <openssl/evp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KEY_SIZE = 32, TAG_SIZE = 16, NONCE_SIZE = 12 };
typedef enum { CIPHER_AES_128_GCM = 1, CIPHER_CHACHA20_POLY1305 = 2 } cipher_kind;

/* A record is sealed in two parts, each with a tag of its own: its header, which has the length, and its body. */
typedef enum { PART_HEADER = 0, PART_BODY = 1 } record_part;

/* Records under one key; then both ends go on to the next, derived from it, without a message.
 *
 * RFC 8446, section 5.5, lets AES-GCM seal 2^24.5 records of 2^14 bytes under a key: 2^34.5 of the cipher's blocks. 2^18
 * records of 2^18 bytes are 2^32. */
#define RECORDS_PER_KEY ((uint64_t)1 << 18)

/* HMAC-SHA256. Also HKDF-Extract, with the salt as key. False where libcrypto fails. */
bool hmac_sha256(const unsigned char *key, size_t key_size, const void *data, size_t size, unsigned char out[KEY_SIZE]);

/* HKDF-Expand: `size` bytes, at most 64, from a key, a label and some context of at most 64 bytes. */
bool hkdf_expand(const unsigned char key[KEY_SIZE], const char *label, const void *context, size_t context_size,
                 unsigned char *out, size_t size);

/* Whether this processor computes AES and GHASH itself. Without, ChaCha20-Poly1305 is faster, and has no timing to read. */
bool processor_has_aes(void);

typedef struct {
  EVP_CIPHER_CTX *context;
  cipher_kind kind;
  bool sealing;
  uint64_t update; /* how often the key has been replaced */
  unsigned char traffic[KEY_SIZE];
  unsigned char iv[NONCE_SIZE];
} direction_t;

/* Begins a direction from its traffic secret. False where libcrypto fails; direction_end is due all the same. */
bool direction_begin(direction_t *direction, cipher_kind kind, const unsigned char traffic[KEY_SIZE], bool sealing);

/* Seals part of record `record` (0, 1, 2, ...): writes `size` bytes and then a tag. */
bool direction_seal(direction_t *direction, uint64_t record, record_part part, const unsigned char *plain, size_t size,
                    unsigned char *sealed);

/* Opens what direction_seal made, of `size` bytes and a tag. `plain` must be used by nobody before this has answered true. */
bool direction_open(direction_t *direction, uint64_t record, record_part part, const unsigned char *sealed, size_t size,
                    unsigned char *plain);

/* Wipes the keys. */
void direction_end(direction_t *direction);

#ifdef MUSTER_NCCL_TESTING
/* Lowers RECORDS_PER_KEY: MUSTER_TEST_RECORDS_PER_KEY in the environment. In test builds alone. */
uint64_t records_per_key(void);
#else
static inline uint64_t records_per_key(void) { return RECORDS_PER_KEY; }
#endif

#endif
