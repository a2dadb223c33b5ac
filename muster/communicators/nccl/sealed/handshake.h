/* The beginning of one connection: each side proves the generation's secret, and both take fresh keys.
 *
 *   dialer -> listener   hello: who is looked for, which connection of how many, nonce, X25519 key; HMAC over it
 *   listener -> dialer   answer: nonce, X25519 key, cipher; HMAC over all before
 *   dialer -> listener   finish: HMAC over all before
 *
 * A stranger costs the listener a place in its table and one HMAC: before the hello's proof is right nothing is computed
 * for it. Who recorded a hello gets an answer, and cannot finish. No function here blocks. */
#ifndef MUSTER_HANDSHAKE_H
#define MUSTER_HANDSHAKE_H

#include <openssl/evp.h>
#include <stdbool.h>
#include <stdint.h>

#include "interfaces.h"
#include "keys.h"

enum { ID_SIZE = 16, MAX_CONNECTIONS = 16 };

typedef struct {
  unsigned char magic[8], generation[8];
  unsigned char listener[ID_SIZE], communicator[ID_SIZE];
  unsigned char connection, connections, has_aes, zero[5];
  unsigned char nonce[32], public_key[32];
  unsigned char proof[KEY_SIZE];
} hello_t;

typedef struct {
  unsigned char nonce[32], public_key[32];
  unsigned char cipher, zero[7];
  unsigned char proof[KEY_SIZE];
} answer_t;

typedef enum {
  STEP_CONNECTING,
  STEP_SENDS_HELLO,
  STEP_READS_ANSWER,
  STEP_SENDS_FINISH,
  STEP_READS_HELLO,
  STEP_SENDS_ANSWER,
  STEP_READS_FINISH,
  STEP_DONE,
  STEP_FAILED,
} handshake_step_t;

typedef struct {
  handshake_step_t step;
  int socket; /* -1: none */
  bool proved;    /* the other side holds the secret, or has recorded who did */
  bool may_retry; /* failed before the other side said anything */
  uint64_t generation;
  int64_t deadline_ns;
  uint64_t arrival; /* which came first */
  size_t moved;     /* bytes of the present message */
  hello_t hello;
  answer_t answer;
  unsigned char finish[KEY_SIZE], wanted[KEY_SIZE];
  EVP_PKEY *own_key;
  unsigned char dialer_sends[KEY_SIZE], listener_sends[KEY_SIZE]; /* traffic secrets */
  cipher_kind cipher;
  struct sockaddr_storage peer;
  char peer_text[ADDRESS_TEXT_SIZE];
  char failure[224]; /* what was wrong, and the remedy; without the address */
} handshake_t;

/* Begins to connect to `peer`. What is in `hello` says with which listener; nonce, key and proof are made here. */
void handshake_dial(handshake_t *handshake, const struct sockaddr_storage *peer, uint64_t generation, const hello_t *hello,
                    int64_t deadline_ns);

/* Takes a socket that a listener has accepted. */
void handshake_receive(handshake_t *handshake, int socket, const struct sockaddr_storage *peer, uint64_t generation,
                       int64_t deadline_ns);

/* Goes on as far as it can without waiting. `listener` is the listener's id; NULL on the side that dials. */
void handshake_go_on(handshake_t *handshake, const unsigned char *listener, int64_t now_ns);

/* Closes its socket, unless somebody has taken it (and set -1), and wipes its keys. */
void handshake_end(handshake_t *handshake);

int64_t now_ns(void);
void put_64(unsigned char bytes[8], uint64_t value);
uint64_t get_64(const unsigned char bytes[8]);

#endif
