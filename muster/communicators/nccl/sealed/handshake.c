#define _GNU_SOURCE
#include "handshake.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <openssl/sha.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "secret.h"

_Static_assert(sizeof(hello_t) == 152, "the hello has no gaps");
_Static_assert(sizeof(answer_t) == 104, "the answer has no gaps");
#ifdef MUSTER_PLAIN_FOR_BENCH
static const char MAGIC[] = "MSNPLAIN"; /* so that it meets no sealed one */
#else
static const char MAGIC[] = "MSNCCLH1";
#endif
static const char ANOTHER_SECRET[] =
    "it holds another secret or another generation than this process, or is not one of this job's; start the job again "
    "if both are its workers";

int64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

void put_64(unsigned char bytes[8], uint64_t value) {
  for (int i = 0; i < 8; i++) bytes[i] = (unsigned char)(value >> (8 * i));
}

uint64_t get_64(const unsigned char bytes[8]) {
  uint64_t value = 0;
  for (int i = 7; i >= 0; i--) value = value << 8 | bytes[i];
  return value;
}

__attribute__((format(printf, 2, 3))) static void fail(handshake_t *handshake, const char *format, ...) {
  va_list values;
  va_start(values, format);
  vsnprintf(handshake->failure, sizeof handshake->failure, format, values);
  va_end(values);
  handshake->step = STEP_FAILED;
}

/* ---------------------------------------------------------------- keys */

/* HKDF-Extract of the generation's secret; the caller wipes it. False where this process holds it no more. */
static bool early_key(const handshake_t *handshake, unsigned char early[KEY_SIZE]) {
  unsigned char secret[MUSTER_NCCL_SECRET_SIZE];
  uint64_t held;
  static const unsigned char salt[] = "muster nccl 1";
  bool good = secret_of(handshake->generation, secret, &held) &&
              hmac_sha256(salt, sizeof salt - 1, secret, sizeof secret, early);
  OPENSSL_cleanse(secret, sizeof secret);
  return good;
}

static bool hello_proof(const handshake_t *handshake, unsigned char proof[KEY_SIZE]) {
  unsigned char early[KEY_SIZE], key[KEY_SIZE];
  bool good = early_key(handshake, early) && hkdf_expand(early, "muster nccl 1 hello", NULL, 0, key, KEY_SIZE) &&
              hmac_sha256(key, KEY_SIZE, &handshake->hello, offsetof(hello_t, proof), proof);
  OPENSSL_cleanse(early, sizeof early);
  OPENSSL_cleanse(key, sizeof key);
  return good;
}

static bool make_key(handshake_t *handshake, unsigned char public_key[32]) {
  size_t size = 32;
  handshake->own_key = EVP_PKEY_Q_keygen(NULL, NULL, "X25519");
  return handshake->own_key != NULL && EVP_PKEY_get_raw_public_key(handshake->own_key, public_key, &size) == 1 && size == 32;
}

static bool exchange(const handshake_t *handshake, const unsigned char theirs[32], unsigned char shared[32]) {
  size_t size = 32;
  EVP_PKEY *key = EVP_PKEY_new_raw_public_key(EVP_PKEY_X25519, NULL, theirs, 32);
  EVP_PKEY_CTX *context = EVP_PKEY_CTX_new(handshake->own_key, NULL);
  bool good = key != NULL && context != NULL && EVP_PKEY_derive_init(context) == 1 && /* a point of low order fails */
              EVP_PKEY_derive_set_peer(context, key) == 1 && EVP_PKEY_derive(context, shared, &size) == 1 && size == 32;
  EVP_PKEY_CTX_free(context);
  EVP_PKEY_free(key);
  return good;
}

/* Computes both traffic secrets and both proofs, all bound to hello and answer. */
static bool derive(handshake_t *handshake, const unsigned char theirs[32], unsigned char answer_proof[KEY_SIZE],
                   unsigned char finish[KEY_SIZE]) {
  unsigned char early[KEY_SIZE], salt[KEY_SIZE], shared[32], master[KEY_SIZE], key[KEY_SIZE];
  unsigned char text[sizeof(hello_t) + offsetof(answer_t, proof)], context[2 * KEY_SIZE];
  memcpy(text, &handshake->hello, sizeof(hello_t));
  memcpy(text + sizeof(hello_t), &handshake->answer, offsetof(answer_t, proof));
  bool good = early_key(handshake, early) && hkdf_expand(early, "muster nccl 1 derived", NULL, 0, salt, KEY_SIZE) &&
              exchange(handshake, theirs, shared) && hmac_sha256(salt, KEY_SIZE, shared, sizeof shared, master) &&
              SHA256(text, sizeof text, context) != NULL;
  good = good && hkdf_expand(master, "muster nccl 1 listener proves", NULL, 0, key, KEY_SIZE) &&
         hmac_sha256(key, KEY_SIZE, context, KEY_SIZE, answer_proof);
  if (good) memcpy(context + KEY_SIZE, answer_proof, KEY_SIZE);
  good = good && hkdf_expand(master, "muster nccl 1 dialer proves", NULL, 0, key, KEY_SIZE) &&
         hmac_sha256(key, KEY_SIZE, context, sizeof context, finish) &&
         hkdf_expand(master, "muster nccl 1 dialer sends", context, sizeof context, handshake->dialer_sends, KEY_SIZE) &&
         hkdf_expand(master, "muster nccl 1 listener sends", context, sizeof context, handshake->listener_sends, KEY_SIZE);
  OPENSSL_cleanse(early, sizeof early);
  OPENSSL_cleanse(salt, sizeof salt);
  OPENSSL_cleanse(shared, sizeof shared);
  OPENSSL_cleanse(master, sizeof master);
  OPENSSL_cleanse(key, sizeof key);
  EVP_PKEY_free(handshake->own_key); /* of no more use: what is recorded today stays closed */
  handshake->own_key = NULL;
  return good;
}

/* ---------------------------------------------------------------- steps */

/* Moves the rest of a message: 1 all of it, 0 not yet, -1 the connection is at its end. */
static int move(handshake_t *handshake, bool sending, void *message, size_t size) {
  while (handshake->moved < size) {
    unsigned char *at = (unsigned char *)message + handshake->moved;
    ssize_t count = sending ? send(handshake->socket, at, size - handshake->moved, MSG_NOSIGNAL | MSG_DONTWAIT)
                            : recv(handshake->socket, at, size - handshake->moved, MSG_DONTWAIT);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    if (count <= 0) return -1;
    handshake->moved += (size_t)count;
  }
  handshake->moved = 0;
  return 1;
}

void handshake_dial(handshake_t *handshake, const struct sockaddr_storage *peer, uint64_t generation, const hello_t *hello,
                    int64_t deadline_ns) {
  memset(handshake, 0, sizeof *handshake);
  handshake->peer = *peer;
  address_text(peer, handshake->peer_text);
  handshake->generation = generation;
  handshake->deadline_ns = deadline_ns;
  handshake->hello = *hello;
  memcpy(handshake->hello.magic, MAGIC, 8);
  put_64(handshake->hello.generation, generation);
  handshake->hello.has_aes = processor_has_aes();
  handshake->step = STEP_CONNECTING;
  handshake->socket = socket(peer->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (handshake->socket < 0) {
    fail(handshake, "no socket can be opened (%s); allow this process more descriptors (ulimit -n)", strerror(errno));
  } else if (RAND_bytes(handshake->hello.nonce, 32) != 1 || !make_key(handshake, handshake->hello.public_key)) {
    fail(handshake, "libcrypto makes no X25519 key; repair OpenSSL on this host");
  } else if (!hello_proof(handshake, handshake->hello.proof)) {
    fail(handshake, "this process no longer holds the secret of generation %llu", (unsigned long long)generation);
  } else if (connect(handshake->socket, (const struct sockaddr *)peer, address_size(peer)) != 0 && errno != EINPROGRESS) {
    fail(handshake, "it cannot be reached (%s); look at the route and the firewalls between the hosts", strerror(errno));
  }
}

void handshake_receive(handshake_t *handshake, int socket, const struct sockaddr_storage *peer, uint64_t generation,
                       int64_t deadline_ns) {
  memset(handshake, 0, sizeof *handshake);
  handshake->peer = *peer;
  address_text(peer, handshake->peer_text);
  handshake->generation = generation;
  handshake->deadline_ns = deadline_ns;
  handshake->socket = socket;
  handshake->step = STEP_READS_HELLO;
}

static int finish_connect(handshake_t *handshake) {
  struct pollfd wait = {.fd = handshake->socket, .events = POLLOUT};
  if (poll(&wait, 1, 0) <= 0) return 0;
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(handshake->socket, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error == 0) return 1;
  handshake->may_retry = error == ECONNREFUSED || error == ECONNRESET;
  fail(handshake, "it cannot be reached (%s); look whether its process is alive, and at the firewalls between the hosts",
       strerror(error));
  return 0;
}

/* The listener's look at a hello: one comparison and one HMAC before anything is made for who sent it. */
static void judge_hello(handshake_t *handshake, const unsigned char *listener) {
  const hello_t *hello = &handshake->hello;
  static const unsigned char zero[sizeof hello->zero];
  unsigned char proof[KEY_SIZE];
  if (memcmp(hello->magic, MAGIC, 8) != 0 || memcmp(hello->zero, zero, sizeof zero) != 0 || hello->connections < 1 ||
      hello->connections > MAX_CONNECTIONS || hello->connection >= hello->connections || hello->has_aes > 1) {
    fail(handshake, "what it sent is no hello of Muster's; no process of the job did that, see who connects to this port");
  } else if (get_64(hello->generation) != handshake->generation) {
    fail(handshake, "it is of generation %llu and this process of %llu; the older one has to join its job again",
         (unsigned long long)get_64(hello->generation), (unsigned long long)handshake->generation);
  } else if (memcmp(hello->listener, listener, ID_SIZE) != 0) {
    fail(handshake, "it looked for another listener; something between the hosts sends it here");
  } else if (!hello_proof(handshake, proof) || CRYPTO_memcmp(proof, hello->proof, KEY_SIZE) != 0) {
    fail(handshake, "%s", ANOTHER_SECRET);
  } else {
    handshake->proved = true;
    bool aes = hello->has_aes == 1 && processor_has_aes();
    handshake->cipher = aes ? CIPHER_AES_128_GCM : CIPHER_CHACHA20_POLY1305;
    handshake->answer.cipher = (unsigned char)handshake->cipher;
    if (RAND_bytes(handshake->answer.nonce, 32) != 1 || !make_key(handshake, handshake->answer.public_key) ||
        !derive(handshake, hello->public_key, handshake->answer.proof, handshake->wanted)) {
      fail(handshake, "no keys can be agreed on with it");
    } else {
      handshake->step = STEP_SENDS_ANSWER;
    }
  }
}

/* The dialer's look at an answer. */
static void judge_answer(handshake_t *handshake) {
  const answer_t *answer = &handshake->answer;
  unsigned char proof[KEY_SIZE];
  handshake->cipher = (cipher_kind)answer->cipher;
  bool fits = handshake->cipher == CIPHER_CHACHA20_POLY1305 ||
              (handshake->cipher == CIPHER_AES_128_GCM && handshake->hello.has_aes == 1);
  if (!derive(handshake, answer->public_key, proof, handshake->finish) ||
      CRYPTO_memcmp(proof, answer->proof, KEY_SIZE) != 0 || !fits) {
    fail(handshake, "%s", ANOTHER_SECRET);
  } else {
    handshake->proved = true;
    handshake->step = STEP_SENDS_FINISH;
  }
}

/* One step: whether another can follow at once. */
static bool take_step(handshake_t *handshake, const unsigned char *listener) {
  int moved = 0;
  switch (handshake->step) {
    case STEP_CONNECTING:
      if ((moved = finish_connect(handshake)) == 1) handshake->step = STEP_SENDS_HELLO;
      break;
    case STEP_SENDS_HELLO:
      moved = move(handshake, true, &handshake->hello, sizeof handshake->hello);
      if (moved == 1) handshake->step = STEP_READS_ANSWER;
      break;
    case STEP_READS_ANSWER:
      if ((moved = move(handshake, false, &handshake->answer, sizeof handshake->answer)) == 1) judge_answer(handshake);
      break;
    case STEP_SENDS_FINISH:
      if ((moved = move(handshake, true, handshake->finish, KEY_SIZE)) == 1) handshake->step = STEP_DONE;
      break;
    case STEP_READS_HELLO:
      if ((moved = move(handshake, false, &handshake->hello, sizeof handshake->hello)) == 1) judge_hello(handshake, listener);
      break;
    case STEP_SENDS_ANSWER:
      moved = move(handshake, true, &handshake->answer, sizeof handshake->answer);
      if (moved == 1) handshake->step = STEP_READS_FINISH;
      break;
    case STEP_READS_FINISH:
      if ((moved = move(handshake, false, handshake->finish, KEY_SIZE)) != 1) break;
      if (CRYPTO_memcmp(handshake->finish, handshake->wanted, KEY_SIZE) == 0) {
        handshake->step = STEP_DONE;
      } else {
        fail(handshake, "%s", ANOTHER_SECRET);
      }
      break;
    case STEP_DONE:
    case STEP_FAILED:
      return false;
  }
  if (moved < 0) {
    handshake->may_retry = handshake->step == STEP_READS_ANSWER || handshake->step == STEP_SENDS_HELLO;
    fail(handshake, "it ended the connection before both had proved themselves: %s", ANOTHER_SECRET);
  }
  return moved == 1;
}

void handshake_go_on(handshake_t *handshake, const unsigned char *listener, int64_t now) {
  bool moved = false; /* what came in time is not late because nobody looked */
  while (take_step(handshake, listener)) moved = true;
  if (!moved && handshake->step != STEP_DONE && handshake->step != STEP_FAILED && now > handshake->deadline_ns) {
    fail(handshake, "it did not finish its handshake in time; look whether its process stands still");
  }
}

void handshake_end(handshake_t *handshake) {
  if (handshake->socket >= 0) close(handshake->socket);
  handshake->socket = -1;
  EVP_PKEY_free(handshake->own_key);
  handshake->own_key = NULL;
  OPENSSL_cleanse(handshake->dialer_sends, KEY_SIZE);
  OPENSSL_cleanse(handshake->listener_sends, KEY_SIZE);
  OPENSSL_cleanse(handshake->wanted, KEY_SIZE);
}
