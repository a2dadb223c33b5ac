/* The table that NCCL looks for. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "errors.h"
#include "interfaces.h"
#include "meeting.h"
#include "muster_nccl.h"
#include "secret.h"

enum { DEFAULT_CONNECTIONS = 4, DEFAULT_PATIENCE_S = 120, MAX_PATIENCE_S = 86400 };
static const int64_t NS_PER_S = 1000000000;

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static interface_t interfaces[MAX_INTERFACES];
static int interface_count;
static meeting_settings_t settings;

/* A whole number from the environment; -1 where it cannot be read or is out of range: the reason says so. */
static long setting(const char *name, long least, long most, long otherwise) {
  const char *text = getenv(name);
  if (text == NULL || *text == '\0') return otherwise;
  char *end = NULL;
  errno = 0;
  long value = strtol(text, &end, 10);
  if (errno == 0 && *end == '\0' && value >= least && value <= most) return value;
  reason_say("NCCL's network cannot begin: %s=%.32s is no whole number from %ld to %ld.", name, text, least, most);
  return -1;
}

static ncclResult_t begin(void) {
  char wrong[256];
  uint64_t generation;
  if (muster_nccl_self_test(wrong, sizeof wrong) != 0) {
    reason_say("NCCL's traffic cannot be encrypted: %s", wrong);
    return ncclSystemError;
  }
  if (!secret_find(&generation)) return ncclInvalidUsage;
  long connections = setting("MS_NCCL_CONNECTIONS", 1, MAX_CONNECTIONS, DEFAULT_CONNECTIONS);
  long patience = setting("MS_NCCL_ACCEPT_TIMEOUT", 1, MAX_PATIENCE_S, DEFAULT_PATIENCE_S);
  if (connections < 0 || patience < 0) return ncclInvalidUsage;
  settings.connections = (int)connections;
  settings.patience_ns = patience * NS_PER_S;
  interface_count = interfaces_find(interfaces);
  if (interface_count == 0) return ncclSystemError;
  for (int i = 0; i < interface_count; i++) {
    char text[ADDRESS_TEXT_SIZE];
    address_text(&interfaces[i].address, text);
    log_note("interface %s, address %s, %ld connections, generation %llu", interfaces[i].name, text, connections,
             (unsigned long long)generation);
  }
  return ncclSuccess;
}

static ncclResult_t net_init(ncclDebugLogger_t log) {
  log_to(log);
  pthread_mutex_lock(&init_lock);
  ncclResult_t result = interface_count > 0 ? ncclSuccess : begin();
  pthread_mutex_unlock(&init_lock);
  return result;
}

static ncclResult_t net_devices(int *count) {
  *count = interface_count;
  return ncclSuccess;
}

static ncclResult_t net_properties(int device, ncclNetProperties_v8_t *properties) {
  if (device < 0 || device >= interface_count) return ncclInvalidArgument;
  interface_t *interface = &interfaces[device];
  memset(properties, 0, sizeof *properties);
  properties->name = interface->name;
  properties->pciPath = interface->pci_path[0] != '\0' ? interface->pci_path : NULL;
  properties->guid = (uint64_t)device;
  properties->ptrSupport = NCCL_POINTER_HOST;
  properties->speed = interface->speed_mbps;
  properties->maxComms = 65536;
  properties->maxRecvs = 1;
  return ncclSuccess;
}

static ncclResult_t net_listen(int device, void *handle, void **listen_comm) {
  *listen_comm = NULL;
  if (device < 0 || device >= interface_count) return ncclInvalidArgument;
  if (!pool_begin()) return ncclSystemError;
  listener_t *listener;
  ncclResult_t result = listener_begin(&interfaces[device], &settings, handle, &listener);
  *listen_comm = listener;
  return result;
}

static ncclResult_t net_connect(int device, void *handle, void **send_comm, void **send_device_comm) {
  *send_comm = NULL;
  if (send_device_comm != NULL) *send_device_comm = NULL;
  if (device < 0 || device >= interface_count) return ncclInvalidArgument;
  if (!pool_begin()) return ncclSystemError;
  communicator_t *communicator;
  ncclResult_t result = dialer_connect(&interfaces[device], &settings, handle, &communicator);
  *send_comm = communicator;
  return result;
}

static ncclResult_t net_accept(void *listen_comm, void **recv_comm, void **recv_device_comm) {
  if (recv_device_comm != NULL) *recv_device_comm = NULL;
  communicator_t *communicator;
  ncclResult_t result = listener_accept(listen_comm, &communicator);
  *recv_comm = communicator;
  return result;
}

static ncclResult_t net_reg_mr(void *comm, void *data, size_t size, int type, void **mhandle) {
  (void)comm, (void)data, (void)size;
  *mhandle = NULL;
  return type == NCCL_POINTER_HOST ? ncclSuccess : ncclInternalError;
}

static ncclResult_t net_dereg_mr(void *comm, void *mhandle) {
  (void)comm, (void)mhandle;
  return ncclSuccess;
}

static ncclResult_t net_isend(void *send_comm, void *data, int size, int tag, void *mhandle, void **request) {
  (void)tag, (void)mhandle;
  *request = NULL;
  if (size < 0) return ncclInvalidArgument;
  request_t *opened;
  ncclResult_t result = send_begin(send_comm, data, size, &opened);
  *request = opened;
  return result;
}

static ncclResult_t net_irecv(void *recv_comm, int count, void **data, int *sizes, int *tags, void **mhandles, void **request) {
  (void)tags, (void)mhandles;
  *request = NULL;
  if (count != 1 || sizes[0] < 0) return ncclInvalidArgument;
  request_t *opened;
  ncclResult_t result = receive_begin(recv_comm, data[0], sizes[0], &opened);
  *request = opened;
  return result;
}

/* Only what the network writes into a GPU's memory is flushed. */
static ncclResult_t net_iflush(void *recv_comm, int count, void **data, int *sizes, void **mhandles, void **request) {
  (void)recv_comm, (void)count, (void)data, (void)sizes, (void)mhandles;
  *request = NULL;
  return ncclSuccess;
}

static ncclResult_t net_test(void *request, int *done, int *sizes) {
  if (request == NULL) return ncclInvalidArgument;
  return request_test(request, done, sizes);
}

static ncclResult_t net_close(void *comm) {
  communicator_close(comm);
  return ncclSuccess;
}

static ncclResult_t net_close_listen(void *listen_comm) {
  listener_end(listen_comm);
  return ncclSuccess;
}

MUSTER_NCCL_EXPORT extern const ncclNet_v8_t ncclNetPlugin_v8;
const ncclNet_v8_t ncclNetPlugin_v8 = {
    .name = MUSTER_NCCL_NET_NAME,
    .init = net_init,
    .devices = net_devices,
    .getProperties = net_properties,
    .listen = net_listen,
    .connect = net_connect,
    .accept = net_accept,
    .regMr = net_reg_mr,
    .regMrDmaBuf = NULL,
    .deregMr = net_dereg_mr,
    .isend = net_isend,
    .irecv = net_irecv,
    .iflush = net_iflush,
    .test = net_test,
    .closeSend = net_close,
    .closeRecv = net_close,
    .closeListen = net_close_listen,
    .getDeviceMr = NULL,
    .irecvConsumed = NULL,
};
