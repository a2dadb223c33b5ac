/* What NCCL expects of a network plug-in: version 8 of its table, which NCCL 2.19 to 2.32 look for.
 *
 * NCCL calls the functions of one communicator from one thread, those of several from several. None of them may block.
 * connect, accept, isend and irecv that are not ready answer ncclSuccess with NULL, and are asked again. */
#ifndef MUSTER_NCCL_NET_H
#define MUSTER_NCCL_NET_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
  ncclSuccess = 0,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
} ncclResult_t;

/* NCCL's log: level 2 is a warning, 3 a note; the flags say of which part it speaks. */
typedef void (*ncclDebugLogger_t)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

enum { NCCL_LEVEL_WARN = 2, NCCL_LEVEL_INFO = 3, NCCL_PART_INIT = 1, NCCL_PART_NET = 16 };
enum { NCCL_HANDLE_SIZE = 128, NCCL_MAX_REQUESTS = 32, NCCL_POINTER_HOST = 1 };

typedef struct {
  char *name;
  char *pciPath;      /* of the card in /sys, or NULL */
  uint64_t guid;      /* tells cards apart */
  int ptrSupport;     /* NCCL_POINTER_HOST: NCCL copies through the host's memory */
  int regIsGlobal;
  int speed;          /* Mbit/s */
  int port;
  float latency;      /* us; 0 is unknown */
  int maxComms;
  int maxRecvs;       /* receives that one irecv may group */
  int netDeviceType;  /* 0: no code of the network's runs on the GPU */
  int netDeviceVersion;
} ncclNetProperties_v8_t;

typedef struct {
  const char *name;
  ncclResult_t (*init)(ncclDebugLogger_t log);
  ncclResult_t (*devices)(int *count);
  ncclResult_t (*getProperties)(int device, ncclNetProperties_v8_t *properties);
  /* Fills the handle of NCCL_HANDLE_SIZE bytes, which travels to the other side over NCCL's own bootstrap. */
  ncclResult_t (*listen)(int device, void *handle, void **listenComm);
  ncclResult_t (*connect)(int device, void *handle, void **sendComm, void **sendDevComm);
  ncclResult_t (*accept)(void *listenComm, void **recvComm, void **recvDevComm);
  ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);
  ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **mhandle);
  ncclResult_t (*deregMr)(void *comm, void *mhandle);
  ncclResult_t (*isend)(void *sendComm, void *data, int size, int tag, void *mhandle, void **request);
  ncclResult_t (*irecv)(void *recvComm, int n, void **data, int *sizes, int *tags, void **mhandles, void **request);
  ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);
  ncclResult_t (*test)(void *request, int *done, int *sizes);
  ncclResult_t (*closeSend)(void *sendComm);
  ncclResult_t (*closeRecv)(void *recvComm);
  ncclResult_t (*closeListen)(void *listenComm);
  ncclResult_t (*getDeviceMr)(void *comm, void *mhandle, void **deviceHandle);
  ncclResult_t (*irecvConsumed)(void *recvComm, int n, void *request);
} ncclNet_v8_t;

#endif
