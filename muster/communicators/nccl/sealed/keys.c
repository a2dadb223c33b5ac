#include "keys.h"

#include <openssl/crypto.h>
#include <openssl/hmac.h>
#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

#ifdef MUSTER_NCCL_TESTING
uint64_t records_per_key(void) {
  const char *text = getenv("MUSTER_TEST_RECORDS_PER_KEY");
  return text != NULL ? strtoull(text, NULL, 10) : RECORDS_PER_KEY;
}
#endif

bool hmac_sha256(const unsigned char *key, size_t key_size, const void *data, size_t size, unsigned char out[KEY_SIZE]) {
  unsigned int length = 0;
  return HMAC(EVP_sha256(), key, (int)key_size, data, size, out, &length) != NULL && length == KEY_SIZE;
}

bool hkdf_expand(const unsigned char key[KEY_SIZE], const char *label, const void *context, size_t context_size,
                 unsigned char *out, size_t size) {
  unsigned char input[KEY_SIZE + 64 + 64 + 1], block[KEY_SIZE];
  size_t label_size = strlen(label), before = 0, done = 0;
  if (label_size > 64 || context_size > 64 || size > (size_t)2 * KEY_SIZE) return false;
  bool good = true;
  for (unsigned char number = 1; good && done < size; number++) {
    if (before > 0) memcpy(input, block, before);
    memcpy(input + before, label, label_size);
    if (context_size > 0) memcpy(input + before + label_size, context, context_size);
    input[before + label_size + context_size] = number;
    good = hmac_sha256(key, KEY_SIZE, input, before + label_size + context_size + 1, block);
    size_t take = size - done < KEY_SIZE ? size - done : KEY_SIZE;
    memcpy(out + done, block, take);
    done += take;
    before = KEY_SIZE;
  }
  OPENSSL_cleanse(input, sizeof input);
  OPENSSL_cleanse(block, sizeof block);
  return good;
}

bool processor_has_aes(void) {
#ifdef MUSTER_NCCL_TESTING
  const char *text = getenv("MUSTER_TEST_AES");
  if (text != NULL) return *text == '1';
#endif
#if defined(__x86_64__)
  return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
  unsigned long both = HWCAP_AES | HWCAP_PMULL;
  return (getauxval(AT_HWCAP) & both) == both;
#else
  return false;
#endif
}

/* Derives key and iv of the present traffic secret. */
static bool use_traffic(direction_t *direction) {
  unsigned char key[KEY_SIZE];
  bool aes = direction->kind == CIPHER_AES_128_GCM;
  const EVP_CIPHER *cipher = aes ? EVP_aes_128_gcm() : EVP_chacha20_poly1305();
  bool good = hkdf_expand(direction->traffic, "muster nccl 1 key", NULL, 0, key, aes ? 16 : KEY_SIZE) &&
              hkdf_expand(direction->traffic, "muster nccl 1 iv", NULL, 0, direction->iv, NONCE_SIZE) &&
              EVP_CipherInit_ex(direction->context, cipher, NULL, key, direction->iv, direction->sealing) == 1;
  OPENSSL_cleanse(key, sizeof key);
  return good;
}

bool direction_begin(direction_t *direction, cipher_kind kind, const unsigned char traffic[KEY_SIZE], bool sealing) {
  direction->kind = kind;
  direction->sealing = sealing;
  direction->update = 0;
  memcpy(direction->traffic, traffic, KEY_SIZE);
  direction->context = EVP_CIPHER_CTX_new();
  return direction->context != NULL && use_traffic(direction);
}

/* Sets the nonce of a part of a record, with the key that this record has: as TLS 1.3's KeyUpdate derives it. */
static bool use_record(direction_t *direction, uint64_t record, record_part part) {
  uint64_t update = record / records_per_key();
  while (direction->update < update) {
    unsigned char next[KEY_SIZE];
    bool good = hkdf_expand(direction->traffic, "muster nccl 1 update", NULL, 0, next, KEY_SIZE);
    memcpy(direction->traffic, next, KEY_SIZE);
    OPENSSL_cleanse(next, sizeof next);
    direction->update++;
    if (!good || !use_traffic(direction)) return false;
  }
  if (direction->update != update) return false; /* an older key is gone */
  unsigned char nonce[NONCE_SIZE];
  uint64_t number = record * 2 + (uint64_t)part; /* never twice, in a life: not under a later key either */
  memcpy(nonce, direction->iv, NONCE_SIZE);
  for (int i = 0; i < 8; i++) nonce[NONCE_SIZE - 1 - i] ^= (unsigned char)(number >> (8 * i));
  return EVP_CipherInit_ex(direction->context, NULL, NULL, NULL, nonce, -1) == 1;
}

bool direction_seal(direction_t *direction, uint64_t record, record_part part, const unsigned char *plain, size_t size,
                    unsigned char *sealed) {
  int length = 0;
  return use_record(direction, record, part) &&
         (size == 0 || EVP_EncryptUpdate(direction->context, sealed, &length, plain, (int)size) == 1) &&
         EVP_EncryptFinal_ex(direction->context, sealed + size, &length) == 1 &&
         EVP_CIPHER_CTX_ctrl(direction->context, EVP_CTRL_AEAD_GET_TAG, TAG_SIZE, sealed + size) == 1;
}

bool direction_open(direction_t *direction, uint64_t record, record_part part, const unsigned char *sealed, size_t size,
                    unsigned char *plain) {
  int length = 0;
  unsigned char tag[TAG_SIZE], rest[TAG_SIZE];
  memcpy(tag, sealed + size, TAG_SIZE);
  return use_record(direction, record, part) &&
         (size == 0 || EVP_DecryptUpdate(direction->context, plain, &length, sealed, (int)size) == 1) &&
         EVP_CIPHER_CTX_ctrl(direction->context, EVP_CTRL_AEAD_SET_TAG, TAG_SIZE, tag) == 1 &&
         EVP_DecryptFinal_ex(direction->context, rest, &length) == 1;
}

void direction_end(direction_t *direction) {
  EVP_CIPHER_CTX_free(direction->context); /* wipes its key schedule */
  direction->context = NULL;
  OPENSSL_cleanse(direction->traffic, sizeof direction->traffic);
  OPENSSL_cleanse(direction->iv, sizeof direction->iv);
}
