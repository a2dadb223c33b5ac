/* The handle by which a listener is found. It crosses NCCL's bootstrap in plain text: it holds no secret, and nothing in it
 * is trusted: who changes it makes us knock elsewhere, where nobody proves the secret. */
#ifndef MUSTER_HANDLE_H
#define MUSTER_HANDLE_H

#include "handshake.h"
#include "nccl_net.h"

/* Writes NCCL_HANDLE_SIZE bytes. */
void handle_write(void *handle, uint64_t generation, const unsigned char listener[ID_SIZE],
                  const struct sockaddr_storage *address);

/* False where it is none of ours. `interface` is where a link's own address (fe80::) is meant. */
bool handle_read(const void *handle, const char *interface, uint64_t *generation, unsigned char listener[ID_SIZE],
                 struct sockaddr_storage *address);

#endif
