#define _GNU_SOURCE
#include "secret.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/crypto.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "errors.h"

enum { SEALS = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL };
enum { PAGE_SIZE_BYTES = 4096 };

/* Lives in a page of its own that is in no core dump, on no disk, and zero in a forked child: hence `held`. */
typedef struct {
  bool held;
  bool given; /* by muster_nccl_use_secret: the descriptor is then not asked */
  uint64_t generation;
  unsigned char bytes[MUSTER_NCCL_SECRET_SIZE];
} page_t;

static pthread_mutex_t secret_lock = PTHREAD_MUTEX_INITIALIZER;
static page_t *page;

static bool make_page(void) {
  if (page != NULL) return true;
  void *made = mmap(NULL, PAGE_SIZE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return false;
  (void)mlock(made, PAGE_SIZE_BYTES); /* a limit of locked memory is no reason to refuse */
  (void)madvise(made, PAGE_SIZE_BYTES, MADV_DONTDUMP);
  (void)madvise(made, PAGE_SIZE_BYTES, MADV_WIPEONFORK);
  page = made;
  return true;
}

static void keep(uint64_t generation, const unsigned char *secret, bool given) {
  OPENSSL_cleanse(page->bytes, sizeof page->bytes);
  memcpy(page->bytes, secret, sizeof page->bytes);
  page->generation = generation;
  page->given = given;
  page->held = true;
}

int muster_nccl_use_secret(uint64_t generation, const unsigned char secret[32]) {
  if (secret == NULL) {
    reason_say("NCCL's traffic cannot be encrypted: the secret that was handed over is empty.");
    return -1;
  }
  pthread_mutex_lock(&secret_lock);
  bool made = make_page();
  if (made) keep(generation, secret, true);
  pthread_mutex_unlock(&secret_lock);
  if (!made) {
    reason_say("NCCL's traffic cannot be encrypted: no memory to keep its secret in; give this process more.");
    return -1;
  }
  return 0;
}

/* Reads the descriptor's 48 bytes into `content`; NULL, or what is wrong with it. */
static const char *read_descriptor(int descriptor, unsigned char content[MUSTER_NCCL_MEMFD_SIZE]) {
  int seals = fcntl(descriptor, F_GET_SEALS);
  if (seals < 0) return errno == EBADF ? "is not open" : "is no sealed memory";
  if ((seals & SEALS) != SEALS) return "is not sealed against changes";
  ssize_t got = pread(descriptor, content, MUSTER_NCCL_MEMFD_SIZE, 0);
  if (got != MUSTER_NCCL_MEMFD_SIZE || memcmp(content, MUSTER_NCCL_MEMFD_MAGIC, 8) != 0) return "holds no secret of NCCL's";
  return NULL;
}

static uint64_t little_endian(const unsigned char bytes[8]) {
  uint64_t value = 0;
  for (int i = 7; i >= 0; i--) value = value << 8 | bytes[i];
  return value;
}

/* Takes the descriptor's secret where it is newer than what is held. NULL, or what is wrong. */
static const char *refresh(const char *text) {
  char *end = NULL;
  errno = 0;
  long number = strtol(text, &end, 10);
  if (errno != 0 || *text == '\0' || *end != '\0' || number < 0 || number > 1 << 20) return "is no number of a descriptor";
  unsigned char content[MUSTER_NCCL_MEMFD_SIZE];
  const char *wrong = read_descriptor((int)number, content);
  if (wrong == NULL && !make_page()) wrong = "cannot be kept: no memory";
  if (wrong == NULL) {
    uint64_t generation = little_endian(content + 8);
    if (!page->held || generation > page->generation) keep(generation, content + 16, false);
  }
  OPENSSL_cleanse(content, sizeof content);
  return wrong;
}

bool secret_find(uint64_t *generation) {
  const char *text = getenv("MS_NCCL_SECRET_FD"), *wrong = NULL;
  pthread_mutex_lock(&secret_lock);
  bool given = page != NULL && page->held && page->given;
  if (!given && text != NULL) wrong = refresh(text);
  bool held = page != NULL && page->held;
  if (held) *generation = page->generation;
  pthread_mutex_unlock(&secret_lock);
  if (wrong != NULL) {
    reason_say("NCCL's traffic cannot be encrypted: descriptor %.20s of MS_NCCL_SECRET_FD %s; start this program "
               "from its Muster worker, and let it inherit its descriptors.", text, wrong);
    return false;
  }
  if (!held) {
    reason_say("NCCL's traffic cannot be encrypted: this process has no secret (neither muster_nccl_use_secret nor "
               "MS_NCCL_SECRET_FD); start it from its Muster worker.");
  }
  return held;
}

bool secret_of(uint64_t generation, unsigned char secret[MUSTER_NCCL_SECRET_SIZE], uint64_t *held) {
  const char *text = getenv("MS_NCCL_SECRET_FD");
  pthread_mutex_lock(&secret_lock);
  bool given = page != NULL && page->held && page->given;
  bool present = page != NULL && page->held && page->generation == generation;
  if (!present && !given && text != NULL) (void)refresh(text);
  bool any = page != NULL && page->held;
  *held = any ? page->generation : 0;
  bool found = any && page->generation == generation;
  if (found) memcpy(secret, page->bytes, MUSTER_NCCL_SECRET_SIZE);
  pthread_mutex_unlock(&secret_lock);
  return found;
}
