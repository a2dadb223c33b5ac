/* How a sender and a receiver meet: the handle, who listens, and who dials. Nothing here blocks. */
#ifndef MUSTER_MEETING_H
#define MUSTER_MEETING_H

#include "communicator.h"
#include "interfaces.h"

typedef struct listener listener_t;

/* What the environment says, read once at init. */
typedef struct {
  int connections;
  int64_t patience_ns; /* that accept and connect have */
} meeting_settings_t;

/* Listens on an interface, and fills the handle of NCCL_HANDLE_SIZE bytes. */
ncclResult_t listener_begin(const interface_t *interface, const meeting_settings_t *settings, void *handle,
                            listener_t **listener);

/* Goes on with those that have come; *communicator is NULL until all connections of one have proved themselves.
 *
 * At most MAX_GUESTS are in the table. Where one more comes, the oldest that has proved nothing goes; each has few seconds.
 * So strangers neither stall nor exhaust it. Who is refused ends nothing: the right one may still come. */
ncclResult_t listener_accept(listener_t *listener, communicator_t **communicator);

void listener_end(listener_t *listener);

/* Goes on with a connect that NCCL asks for by this handle, which it keeps at the same address from call to call. */
ncclResult_t dialer_connect(const interface_t *interface, const meeting_settings_t *settings, const void *handle,
                            communicator_t **communicator);

#endif
