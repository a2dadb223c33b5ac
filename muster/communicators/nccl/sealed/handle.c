#define _GNU_SOURCE
#include "handle.h"

#include <netinet/in.h>
#include <string.h>

typedef struct {
  unsigned char magic[8], generation[8], listener[ID_SIZE];
  unsigned char family, zero, port[2];
  unsigned char address[16];
  unsigned char rest[NCCL_HANDLE_SIZE - 8 - 8 - ID_SIZE - 4 - 16];
} written_t;

_Static_assert(sizeof(written_t) == NCCL_HANDLE_SIZE, "the handle is as large as NCCL says");
static const char MAGIC[] = "MSNCCLA1";

void handle_write(void *handle, uint64_t generation, const unsigned char listener[ID_SIZE],
                  const struct sockaddr_storage *address) {
  written_t written;
  memset(&written, 0, sizeof written);
  memcpy(written.magic, MAGIC, 8);
  put_64(written.generation, generation);
  memcpy(written.listener, listener, ID_SIZE);
  if (address->ss_family == AF_INET) {
    const struct sockaddr_in *four = (const struct sockaddr_in *)address;
    written.family = 4;
    memcpy(written.port, &four->sin_port, 2);
    memcpy(written.address, &four->sin_addr, 4);
  } else {
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)address;
    written.family = 6;
    memcpy(written.port, &six->sin6_port, 2);
    memcpy(written.address, &six->sin6_addr, 16);
  }
  memcpy(handle, &written, sizeof written);
}

bool handle_read(const void *handle, const char *interface, uint64_t *generation, unsigned char listener[ID_SIZE],
                 struct sockaddr_storage *address) {
  written_t written;
  memcpy(&written, handle, sizeof written);
  memset(address, 0, sizeof *address);
  *generation = get_64(written.generation);
  memcpy(listener, written.listener, ID_SIZE);
  if (memcmp(written.magic, MAGIC, 8) != 0) return false;
  if (written.family == 4) {
    struct sockaddr_in *four = (struct sockaddr_in *)address;
    four->sin_family = AF_INET;
    memcpy(&four->sin_port, written.port, 2);
    memcpy(&four->sin_addr, written.address, 4);
    return true;
  }
  struct sockaddr_in6 *six = (struct sockaddr_in6 *)address;
  six->sin6_family = AF_INET6;
  memcpy(&six->sin6_port, written.port, 2);
  memcpy(&six->sin6_addr, written.address, 16);
  if (IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr)) six->sin6_scope_id = if_nametoindex(interface);
  return written.family == 6;
}
