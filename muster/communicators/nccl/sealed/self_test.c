#include <openssl/crypto.h>
#include <openssl/opensslv.h>
#include <openssl/rand.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "keys.h"
#include "muster_nccl.h"

/* RFC 5869, appendix A, test case 3: no salt, no info; its first 32 bytes. */
static bool hkdf_is_right(void) {
  static const unsigned char wanted[KEY_SIZE] = {0x8d, 0xa4, 0xe7, 0x75, 0xa5, 0x63, 0xc1, 0x8f, 0x71, 0x5f, 0x80,
                                                 0x2a, 0x06, 0x3c, 0x5a, 0x31, 0xb8, 0xa1, 0x1f, 0x5c, 0x5e, 0xe1,
                                                 0x87, 0x9e, 0xc3, 0x45, 0x4e, 0x5f, 0x3c, 0x73, 0x8d, 0x2d};
  unsigned char input[22], salt[KEY_SIZE], prk[KEY_SIZE], got[KEY_SIZE];
  memset(input, 0x0b, sizeof input);
  memset(salt, 0, sizeof salt);
  return hmac_sha256(salt, sizeof salt, input, sizeof input, prk) && hkdf_expand(prk, "", NULL, 0, got, sizeof got) &&
         memcmp(got, wanted, sizeof got) == 0;
}

/* Seals across a change of keys, opens it, and sees one flipped bit refused. */
static bool cipher_is_right(cipher_kind kind) {
  unsigned char traffic[KEY_SIZE], plain[100], sealed[sizeof plain + TAG_SIZE], opened[sizeof plain];
  memset(traffic, 7, sizeof traffic);
  memset(plain, 42, sizeof plain);
  direction_t sends = {0}, receives = {0};
  bool good = direction_begin(&sends, kind, traffic, true) && direction_begin(&receives, kind, traffic, false);
  for (uint64_t record = records_per_key() - 1; good && record < records_per_key() + 1; record++) {
    good = direction_seal(&sends, record, PART_BODY, plain, sizeof plain, sealed) &&
           memcmp(sealed, plain, sizeof plain) != 0 &&
           direction_open(&receives, record, PART_BODY, sealed, sizeof plain, opened) &&
           memcmp(opened, plain, sizeof plain) == 0;
  }
  sealed[50] ^= 1;
  good = good && !direction_open(&receives, records_per_key(), PART_BODY, sealed, sizeof plain, opened);
  direction_end(&sends);
  direction_end(&receives);
  return good;
}

static bool exchange_is_there(void) {
  EVP_PKEY *key = EVP_PKEY_Q_keygen(NULL, NULL, "X25519");
  unsigned char random[16];
  bool good = key != NULL && RAND_bytes(random, sizeof random) == 1;
  EVP_PKEY_free(key);
  return good;
}

int muster_nccl_self_test(char *buffer, size_t size) {
  const char *missing = NULL;
  if (OpenSSL_version_num() < 0x30000000UL) {
    missing = "libcrypto is older than OpenSSL 3.0; install OpenSSL 3.";
  } else if (!hkdf_is_right()) {
    missing = "libcrypto computes no HKDF-SHA256 as RFC 5869 has it; repair OpenSSL on this host.";
  } else if (!cipher_is_right(CIPHER_AES_128_GCM)) {
    missing = "libcrypto does not seal with AES-128-GCM; repair OpenSSL on this host.";
  } else if (!cipher_is_right(CIPHER_CHACHA20_POLY1305)) {
    missing = "libcrypto does not seal with ChaCha20-Poly1305, which a FIPS provider lacks; use OpenSSL's default provider.";
  } else if (!exchange_is_there()) {
    missing = "libcrypto makes no X25519 key, which a FIPS provider lacks; use OpenSSL's default provider.";
  }
  if (buffer != NULL && size > 0) snprintf(buffer, size, "%s", missing != NULL ? missing : "");
  return missing != NULL ? -1 : 0;
}

static char version[128];

static void write_version(void) {
  snprintf(version, sizeof version, "%s protocol 1, OpenSSL %s", MUSTER_NCCL_NET_NAME, OpenSSL_version(OPENSSL_VERSION_STRING));
}

const char *muster_nccl_version(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, write_version);
  return version;
}
