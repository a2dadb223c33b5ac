#define _GNU_SOURCE
#include "interfaces.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "errors.h"

/* One reading of NCCL_SOCKET_IFNAME: "^" excludes, "=" wants the whole name; names are otherwise beginnings. */
static bool named(const char *choice, const char *name) {
  bool excluded = *choice == '^';
  if (excluded) choice++;
  bool whole = *choice == '=';
  if (whole) choice++;
  bool hit = false;
  while (*choice != '\0') {
    size_t item = strcspn(choice, ","), length = item;
    const char *colon = memchr(choice, ':', item); /* a port, which sockets have no use for */
    if (colon != NULL) length = (size_t)(colon - choice);
    if (length > 0 && strncmp(name, choice, length) == 0 && (!whole || name[length] == '\0')) hit = true;
    choice += item;
    if (*choice == ',') choice++;
  }
  return hit != excluded;
}

static bool family_fits(int family) {
  const char *wanted = getenv("NCCL_SOCKET_FAMILY");
  if (wanted != NULL && strcmp(wanted, "AF_INET") == 0) return family == AF_INET;
  if (wanted != NULL && strcmp(wanted, "AF_INET6") == 0) return family == AF_INET6;
  return family == AF_INET || family == AF_INET6;
}

static bool known(const interface_t *found, int count, const char *name) {
  for (int i = 0; i < count; i++) {
    if (strcmp(found[i].name, name) == 0) return true;
  }
  return false;
}

static void describe(interface_t *interface, const struct ifaddrs *entry) {
  memset(interface, 0, sizeof *interface);
  snprintf(interface->name, sizeof interface->name, "%s", entry->ifa_name);
  size_t size = entry->ifa_addr->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
  memcpy(&interface->address, entry->ifa_addr, size);
  char path[96];
  snprintf(path, sizeof path, "/sys/class/net/%s/device", interface->name);
  char *resolved = realpath(path, NULL);
  if (resolved != NULL && strlen(resolved) < sizeof interface->pci_path) strcpy(interface->pci_path, resolved);
  free(resolved);
  snprintf(path, sizeof path, "/sys/class/net/%s/speed", interface->name);
  FILE *file = fopen(path, "re");
  if (file == NULL || fscanf(file, "%d", &interface->speed_mbps) != 1 || interface->speed_mbps <= 0) {
    interface->speed_mbps = 10000;
  }
  if (file != NULL) fclose(file);
}

static int collect(const struct ifaddrs *all, const char *choice, interface_t found[MAX_INTERFACES]) {
  int count = 0;
  for (const struct ifaddrs *entry = all; entry != NULL && count < MAX_INTERFACES; entry = entry->ifa_next) {
    if (entry->ifa_addr == NULL || !(entry->ifa_flags & IFF_UP) || !family_fits(entry->ifa_addr->sa_family)) continue;
    if (!named(choice, entry->ifa_name) || known(found, count, entry->ifa_name)) continue;
    describe(&found[count++], entry);
  }
  return count;
}

int interfaces_find(interface_t found[MAX_INTERFACES]) {
  struct ifaddrs *all = NULL;
  if (getifaddrs(&all) != 0) {
    reason_say("NCCL's network cannot begin: the system does not list this host's network interfaces.");
    return 0;
  }
  const char *choice = getenv("NCCL_SOCKET_IFNAME");
  int count = 0;
  if (choice != NULL && *choice != '\0') {
    count = collect(all, choice, found);
  } else { /* NCCL's own order: InfiniBand's cards, then what goes to other hosts, then what may stay on this one */
    static const char *const order[] = {"ib", "^docker,lo,virbr", "docker", "lo"};
    for (size_t i = 0; count == 0 && i < sizeof order / sizeof *order; i++) count = collect(all, order[i], found);
  }
  freeifaddrs(all);
  if (count == 0) {
    const char *family = getenv("NCCL_SOCKET_FAMILY");
    reason_say("NCCL's network cannot begin: this host has no network interface that is up and fits "
               "NCCL_SOCKET_IFNAME=%.64s and NCCL_SOCKET_FAMILY=%.16s; `ip address` lists them.",
               choice != NULL ? choice : "", family != NULL ? family : "");
  }
  return count;
}

void address_text(const struct sockaddr_storage *address, char text[ADDRESS_TEXT_SIZE]) {
  char host[INET6_ADDRSTRLEN] = "?";
  if (address->ss_family == AF_INET) {
    const struct sockaddr_in *four = (const struct sockaddr_in *)address;
    inet_ntop(AF_INET, &four->sin_addr, host, sizeof host);
    snprintf(text, ADDRESS_TEXT_SIZE, "%s:%u", host, ntohs(four->sin_port));
  } else if (address->ss_family == AF_INET6) {
    const struct sockaddr_in6 *six = (const struct sockaddr_in6 *)address;
    inet_ntop(AF_INET6, &six->sin6_addr, host, sizeof host);
    snprintf(text, ADDRESS_TEXT_SIZE, "[%s]:%u", host, ntohs(six->sin6_port));
  } else {
    snprintf(text, ADDRESS_TEXT_SIZE, "an unknown address");
  }
}

socklen_t address_size(const struct sockaddr_storage *address) {
  return address->ss_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
}
