/* Why a communicator ended, in a sentence, and NCCL's log. */
#ifndef MUSTER_ERRORS_H
#define MUSTER_ERRORS_H

#include "nccl_net.h"

enum { REASON_SIZE = 512 };

/* Writes to NCCL's log from now on; NULL says nothing. */
void log_to(ncclDebugLogger_t log);

__attribute__((format(printf, 1, 2))) void log_note(const char *format, ...);

/* Keeps a sentence as the reason (muster_nccl_reason), and writes it to NCCL's log as a warning. */
__attribute__((format(printf, 1, 2))) void reason_say(const char *format, ...);

/* The same, as a note: of what may be nothing, as the exit of a peer that says no farewell. */
__attribute__((format(printf, 1, 2))) void reason_note(const char *format, ...);

#endif
