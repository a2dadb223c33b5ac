/* The plug-in's threads: a bounded number a process, however many communicators and connections there are.
 *
 * Work is done by actors. An actor runs on one thread at a time, never waits for another, and returns when it has nothing
 * to do; whoever gives it something to do wakes it. Actors of a connection: one that moves bytes, one that seals or opens,
 * so that the two go on at the same time. A thread with no actor to run waits for the sockets (one of them) or sleeps.
 *
 * Where threads are to spare, an actor that moves bytes may wait in the system call for a moment (pool_may_wait): cheaper
 * than to go through epoll for each piece. All threads block all signals: those are the program's. */
#ifndef MUSTER_POOL_H
#define MUSTER_POOL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* A record's body: large enough that system calls and hand-overs cost little, small enough to stay in a core's cache. */
enum { BLOCK_BODY = 262144, BLOCK_SIZE = BLOCK_BODY + 64 };
enum { MAX_THREADS = 16, WAIT_US = 2000 };

typedef struct worker worker_t;
struct worker {
  unsigned char *private_block; /* BLOCK_BODY bytes that nobody else sees: what is opened here is not yet verified */
};

typedef struct actor actor_t;
struct actor {
  _Atomic int state;
  bool (*run)(actor_t *actor, worker_t *worker); /* true: there is more to do, others first. worker NULL: not a pool's thread */
  actor_t *next, *before;
};

void actor_begin(actor_t *actor, bool (*run)(actor_t *actor, worker_t *worker));

/* Sees to it that the actor runs after this call. */
void actor_wake(actor_t *actor);

/* Runs it on this thread if it runs on none; else wakes it. Whether it ran here. */
bool actor_run_here(actor_t *actor, worker_t *worker);

/* Returns when it runs nowhere, and will not again. */
void actor_stop(actor_t *actor);

/* A socket whose events wake an actor, once for each watch_arm. */
typedef struct {
  int socket;
  uint32_t index, serial; /* in the pool's table: an event that comes late finds nobody */
  _Atomic uint32_t events;
  actor_t *actor;
} watch_t;

bool watch_begin(watch_t *watch, int socket, actor_t *actor);
void watch_arm(watch_t *watch, uint32_t events);
void watch_end(watch_t *watch);

/* Starts the threads where there are none yet. False where that fails, or in a child forked after it: the reason says so. */
bool pool_begin(void);

/* Whether the process is at its end: no thread runs an actor any more. */
bool pool_has_ended(void);

/* Whether this thread may wait in a system call, WAIT_US at most, because others are idle. If so, pool_has_waited is due. */
bool pool_may_wait(const worker_t *worker);
void pool_has_waited(void);

/* Blocks of BLOCK_SIZE bytes, kept for the next when given back: idle connections hold none. NULL where memory is short. */
unsigned char *block_take(void);
void block_give(unsigned char *block);

#endif
