/* The secret of the present generation, which every connection proves. */
#ifndef MUSTER_SECRET_H
#define MUSTER_SECRET_H

#include <stdbool.h>
#include <stdint.h>

#include "muster_nccl.h"

/* Looks whether there is a secret, reading MS_NCCL_SECRET_FD where nobody has called muster_nccl_use_secret.
 *
 * Returns the generation in *generation. False where there is none: the reason says what is wrong. */
bool secret_find(uint64_t *generation);

/* Copies the secret of one generation, which the caller wipes; reads the descriptor again where that one is newer.
 *
 * False where this process holds another generation's, or none; *held is then the one that it holds, 0 where none.
 * Says nothing: a stranger may have asked. */
bool secret_of(uint64_t generation, unsigned char secret[MUSTER_NCCL_SECRET_SIZE], uint64_t *held);

#endif
