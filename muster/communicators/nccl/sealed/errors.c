#define _GNU_SOURCE
#include "errors.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "muster_nccl.h"

static pthread_mutex_t reason_lock = PTHREAD_MUTEX_INITIALIZER;
static char reason[REASON_SIZE];
static _Atomic(ncclDebugLogger_t) logger;

void log_to(ncclDebugLogger_t log) { atomic_store(&logger, log); }

void log_note(const char *format, ...) {
  ncclDebugLogger_t log = atomic_load(&logger);
  if (log == NULL) return;
  char text[REASON_SIZE];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  log(NCCL_LEVEL_INFO, NCCL_PART_INIT | NCCL_PART_NET, __FILE__, __LINE__, "NET/MusterSealed : %s", text);
}

static void keep(int level, const char text[REASON_SIZE]) {
  pthread_mutex_lock(&reason_lock);
  memcpy(reason, text, sizeof reason);
  pthread_mutex_unlock(&reason_lock);
  ncclDebugLogger_t log = atomic_load(&logger);
  if (log != NULL) log(level, NCCL_PART_NET, __FILE__, __LINE__, "NET/MusterSealed : %s", text);
}

void reason_say(const char *format, ...) {
  char text[REASON_SIZE] = "";
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  keep(NCCL_LEVEL_WARN, text);
}

void reason_note(const char *format, ...) {
  char text[REASON_SIZE] = "";
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  keep(NCCL_LEVEL_INFO, text);
}

int muster_nccl_reason(char *buffer, size_t size) {
  if (buffer == NULL || size == 0) return -1;
  pthread_mutex_lock(&reason_lock);
  int length = (int)strnlen(reason, sizeof reason - 1);
  snprintf(buffer, size, "%s", reason);
  pthread_mutex_unlock(&reason_lock);
  return length;
}

void muster_nccl_forget_reason(void) {
  pthread_mutex_lock(&reason_lock);
  reason[0] = '\0';
  pthread_mutex_unlock(&reason_lock);
}
