#define _GNU_SOURCE
#include "pool.h"

#include <errno.h>
#include <openssl/crypto.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "errors.h"

/* RUNNING_AGAIN: somebody has woken it while it runs. STOPPING: somebody waits in actor_stop. */
enum { IDLE, QUEUED, RUNNING, RUNNING_AGAIN, STOPPING, DEAD };
enum { EVENTS_AT_ONCE = 16, KEPT_BLOCKS = 64, RUNS_WITHOUT_A_LOOK = 32 };

static struct {
  pthread_mutex_t lock;
  pthread_cond_t work, dead;
  actor_t *first, *last;
  int epoll, poke; /* poke: an eventfd that gets the thread out of epoll_wait */
  bool poked, waits; /* waits: a thread is in epoll_wait */
  int asleep, threads, unlooked; /* unlooked: actors run since somebody looked at the sockets */
  pid_t process;
  watch_t **watches;
  uint32_t watch_count, serial;
  atomic_int idle, waiting, running;
  atomic_bool ended;
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER, .work = PTHREAD_COND_INITIALIZER, .dead = PTHREAD_COND_INITIALIZER};

/* ---------------------------------------------------------------- blocks */

static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned char *kept_blocks[KEPT_BLOCKS]; /* the last one given is the first taken: it is still in the cache */
static int kept_count;

unsigned char *block_take(void) {
  unsigned char *block = NULL;
  pthread_mutex_lock(&blocks_lock);
  if (kept_count > 0) block = kept_blocks[--kept_count];
  pthread_mutex_unlock(&blocks_lock);
  if (block == NULL) block = aligned_alloc(64, BLOCK_SIZE);
  return block;
}

void block_give(unsigned char *block) {
  if (block == NULL) return;
  pthread_mutex_lock(&blocks_lock);
  if (kept_count < KEPT_BLOCKS) {
    kept_blocks[kept_count++] = block;
    block = NULL;
  }
  pthread_mutex_unlock(&blocks_lock);
  free(block);
}

/* ---------------------------------------------------------------- the queue; its lock is held */

static void push(actor_t *actor) {
  actor->next = NULL;
  actor->before = pool.last;
  if (pool.last != NULL) pool.last->next = actor;
  else pool.first = actor;
  pool.last = actor;
}

static void unlink_actor(actor_t *actor) {
  if (actor->before != NULL) actor->before->next = actor->next;
  else pool.first = actor->next;
  if (actor->next != NULL) actor->next->before = actor->before;
  else pool.last = actor->before;
}

/* Gets one thread to look at the queue, or at the sockets. */
static void rouse(void) {
  if (pool.asleep > 0) {
    pthread_cond_signal(&pool.work);
  } else if (pool.waits && !pool.poked) {
    pool.poked = true;
    uint64_t one = 1;
    if (write(pool.poke, &one, sizeof one) < 0) pool.poked = false;
  }
}

static bool change(actor_t *actor, int from, int to) { return atomic_compare_exchange_strong(&actor->state, &from, to); }

/* ---------------------------------------------------------------- actors */

void actor_begin(actor_t *actor, bool (*run)(actor_t *actor, worker_t *worker)) {
  atomic_store(&actor->state, IDLE);
  actor->run = run;
  actor->next = actor->before = NULL;
}

/* Each branch that leaves is a read-modify-write of the state: so either the run that follows sees what the caller wrote
 * before, or the state shows that one more is due. */
void actor_wake(actor_t *actor) {
  for (;;) {
    int state = atomic_load(&actor->state);
    switch (state) {
      case IDLE:
        pthread_mutex_lock(&pool.lock);
        bool queued = change(actor, IDLE, QUEUED);
        if (queued) {
          push(actor);
          rouse();
        }
        pthread_mutex_unlock(&pool.lock);
        if (queued) return;
        break;
      case RUNNING:
        if (change(actor, RUNNING, RUNNING_AGAIN)) return;
        break;
      default:
        if (change(actor, state, state)) return;
    }
  }
}

/* Ends a run. The actor may be freed as soon as its state says that it does not run. */
static void end_run(actor_t *actor, bool more, bool by_worker) {
  if (!more && change(actor, RUNNING, IDLE)) return;
  pthread_mutex_lock(&pool.lock);
  if (change(actor, RUNNING, QUEUED) || change(actor, RUNNING_AGAIN, QUEUED)) {
    bool first = pool.first == NULL;
    push(actor);
    if (!(first && by_worker)) rouse(); /* else this thread comes to it next */
  } else {
    atomic_store(&actor->state, DEAD);
    pthread_cond_broadcast(&pool.dead);
  }
  pthread_mutex_unlock(&pool.lock);
}

bool actor_run_here(actor_t *actor, worker_t *worker) {
  if (!change(actor, IDLE, RUNNING)) {
    actor_wake(actor);
    return false;
  }
  bool more = actor->run(actor, worker);
  end_run(actor, more, false);
  return true;
}

void actor_stop(actor_t *actor) {
  pthread_mutex_lock(&pool.lock);
  while (atomic_load(&actor->state) != DEAD) {
    if (change(actor, IDLE, DEAD)) continue;
    if (change(actor, QUEUED, DEAD)) {
      unlink_actor(actor);
      continue;
    }
    if (change(actor, RUNNING, STOPPING) || change(actor, RUNNING_AGAIN, STOPPING) ||
        atomic_load(&actor->state) == STOPPING) {
      pthread_cond_wait(&pool.dead, &pool.lock);
    }
  }
  pthread_mutex_unlock(&pool.lock);
}

/* ---------------------------------------------------------------- sockets */

bool watch_begin(watch_t *watch, int socket, actor_t *actor) {
  watch->socket = socket;
  watch->actor = actor;
  atomic_store(&watch->events, 0);
  bool good = true;
  pthread_mutex_lock(&pool.lock);
  uint32_t index = 0;
  while (index < pool.watch_count && pool.watches[index] != NULL) index++;
  if (index == pool.watch_count) {
    uint32_t count = pool.watch_count == 0 ? 64 : pool.watch_count * 2;
    watch_t **grown = realloc(pool.watches, count * sizeof *grown);
    good = grown != NULL;
    if (good) {
      memset(grown + pool.watch_count, 0, (count - pool.watch_count) * sizeof *grown);
      pool.watches = grown;
      pool.watch_count = count;
    }
  }
  if (good) {
    watch->index = index;
    watch->serial = ++pool.serial;
    pool.watches[index] = watch;
  }
  pthread_mutex_unlock(&pool.lock);
  struct epoll_event event = {.events = EPOLLIN | EPOLLONESHOT};
  event.data.u64 = (uint64_t)watch->serial << 32 | watch->index;
  if (good && epoll_ctl(pool.epoll, EPOLL_CTL_ADD, socket, &event) != 0) {
    watch_end(watch);
    good = false;
  }
  if (!good) watch->actor = NULL;
  return good;
}

void watch_arm(watch_t *watch, uint32_t events) {
  struct epoll_event event = {.events = events | EPOLLONESHOT};
  event.data.u64 = (uint64_t)watch->serial << 32 | watch->index;
  (void)epoll_ctl(pool.epoll, EPOLL_CTL_MOD, watch->socket, &event);
}

void watch_end(watch_t *watch) {
  if (watch->actor == NULL) return;
  (void)epoll_ctl(pool.epoll, EPOLL_CTL_DEL, watch->socket, NULL);
  pthread_mutex_lock(&pool.lock);
  pool.watches[watch->index] = NULL;
  watch->actor = NULL;
  pthread_mutex_unlock(&pool.lock);
}

/* Queues it, or marks it to run again. Who leaves QUEUED or RUNNING_AGAIN needs the lock, which is held. */
static void wake_locked(actor_t *actor) {
  for (int state = IDLE; state == IDLE || state == RUNNING; state = atomic_load(&actor->state)) {
    if (change(actor, RUNNING, RUNNING_AGAIN)) return;
    if (change(actor, IDLE, QUEUED)) {
      push(actor);
      return;
    }
  }
}

/* Waits for the sockets (-1), or only looks at them (0), without the lock, and queues those that they wake. */
static void wait_for_sockets(int timeout_ms) {
  struct epoll_event events[EVENTS_AT_ONCE];
  pool.waits = true;
  pthread_mutex_unlock(&pool.lock);
  int count = epoll_wait(pool.epoll, events, EVENTS_AT_ONCE, timeout_ms);
  pthread_mutex_lock(&pool.lock);
  pool.waits = false;
  pool.unlooked = 0;
  for (int i = 0; i < count; i++) {
    uint32_t index = (uint32_t)events[i].data.u64, serial = (uint32_t)(events[i].data.u64 >> 32);
    if (events[i].data.u64 == UINT64_MAX) {
      uint64_t value;
      if (read(pool.poke, &value, sizeof value) > 0) pool.poked = false;
      continue;
    }
    watch_t *watch = index < pool.watch_count ? pool.watches[index] : NULL;
    if (watch == NULL || watch->serial != serial) continue;
    atomic_fetch_or(&watch->events, events[i].events);
    wake_locked(watch->actor);
  }
}

/* ---------------------------------------------------------------- threads */

bool pool_may_wait(const worker_t *worker) {
  if (worker == NULL || atomic_load(&pool.idle) < 1) return false;
  if (atomic_fetch_add(&pool.waiting, 1) < pool.threads / 2) return true;
  atomic_fetch_sub(&pool.waiting, 1);
  return false;
}

void pool_has_waited(void) { atomic_fetch_sub(&pool.waiting, 1); }

/* The next actor, taken out of the queue as running. */
static actor_t *next_actor(void) {
  for (;;) {
    while (pool.first == NULL || atomic_load(&pool.ended)) {
      atomic_fetch_add(&pool.idle, 1);
      if (!pool.waits && !atomic_load(&pool.ended)) {
        wait_for_sockets(-1);
      } else {
        pool.asleep++;
        pthread_cond_wait(&pool.work, &pool.lock);
        pool.asleep--;
      }
      atomic_fetch_sub(&pool.idle, 1);
    }
    if (++pool.unlooked > RUNS_WITHOUT_A_LOOK && !pool.waits) { /* who always has something to do must not starve the others */
      wait_for_sockets(0);
      continue;
    }
    actor_t *actor = pool.first;
    unlink_actor(actor);
    atomic_exchange(&actor->state, RUNNING);
    if (pool.first != NULL) rouse(); /* a thread that was roused for one finds only that one */
    else if (!pool.waits && pool.asleep > 0) pthread_cond_signal(&pool.work);
    return actor;
  }
}

static void *work(void *argument) {
  worker_t *worker = argument;
  pthread_mutex_lock(&pool.lock);
  for (;;) {
    actor_t *actor = next_actor();
    atomic_fetch_add(&pool.running, 1);
    pthread_mutex_unlock(&pool.lock);
    bool more = actor->run(actor, worker);
    end_run(actor, more, true);
    atomic_fetch_sub(&pool.running, 1);
    pthread_mutex_lock(&pool.lock);
  }
  return NULL;
}

bool pool_has_ended(void) { return atomic_load(&pool.ended); }

/* At the process's end: libcrypto is about to free what the threads use. */
static void end_pool(void) {
  if (pool.process != getpid()) return;
  atomic_store(&pool.ended, true);
  struct timespec pause = {.tv_nsec = 1000000};
  for (int i = 0; i < 500 && atomic_load(&pool.running) > 0; i++) nanosleep(&pause, NULL);
}

static bool start_thread(void) {
  worker_t *worker = calloc(1, sizeof *worker);
  if (worker != NULL) worker->private_block = aligned_alloc(64, BLOCK_BODY);
  pthread_t thread;
  bool memory = worker != NULL && worker->private_block != NULL;
  errno = memory ? pthread_create(&thread, NULL, work, worker) : ENOMEM;
  if (errno != 0) {
    if (worker != NULL) free(worker->private_block);
    free(worker);
    return false;
  }
  (void)pthread_setname_np(thread, "muster-nccl");
  pthread_detach(thread);
  return true;
}

static int threads_wanted(void) {
  cpu_set_t set;
  int processors = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 4;
  return processors < 4 ? 4 : processors > MAX_THREADS ? MAX_THREADS : processors;
}

/* With the lock held: epoll, then the threads. */
static bool start(void) {
  if (OPENSSL_init_crypto(0, NULL) != 1) return false;
  pool.epoll = epoll_create1(EPOLL_CLOEXEC);
  pool.poke = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  struct epoll_event event = {.events = EPOLLIN};
  event.data.u64 = UINT64_MAX;
  if (pool.epoll < 0 || pool.poke < 0 || epoll_ctl(pool.epoll, EPOLL_CTL_ADD, pool.poke, &event) != 0) return false;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int wanted = threads_wanted();
  while (pool.threads < wanted && start_thread()) pool.threads++;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (pool.threads == 0) return false;
  pool.process = getpid();
  (void)atexit(end_pool);
  return true;
}

bool pool_begin(void) {
  pthread_mutex_lock(&pool.lock);
  bool good = pool.process != 0 || start(), here = pool.process == getpid();
  pthread_mutex_unlock(&pool.lock);
  if (!good) {
    reason_say("NCCL's network cannot begin: its threads do not start (%s); allow this process more threads and "
               "descriptors (ulimit -u, -n).", strerror(errno));
  } else if (!here) {
    reason_say("NCCL's network cannot be used in a process forked after it had begun; start that process with spawn.");
  }
  return good && here;
}
