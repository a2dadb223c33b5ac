/* The network interfaces that NCCL would use, as NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY choose them. */
#ifndef MUSTER_INTERFACES_H
#define MUSTER_INTERFACES_H

#include <net/if.h>
#include <stdbool.h>
#include <sys/socket.h>

enum { MAX_INTERFACES = 16, ADDRESS_TEXT_SIZE = 72 };

typedef struct {
  char name[IF_NAMESIZE];
  char pci_path[512]; /* of its card in /sys; "" where it has none */
  int speed_mbps;     /* 10,000 where the system does not say */
  struct sockaddr_storage address;
} interface_t;

/* Finds up to MAX_INTERFACES; returns how many. 0 where none fits: the reason says what was asked for. */
int interfaces_find(interface_t found[MAX_INTERFACES]);

/* Writes "10.0.0.1:4000" or "[fd00::1]:4000". */
void address_text(const struct sockaddr_storage *address, char text[ADDRESS_TEXT_SIZE]);

socklen_t address_size(const struct sockaddr_storage *address);

#endif
