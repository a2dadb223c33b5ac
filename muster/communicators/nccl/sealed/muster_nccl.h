/* What the sealed network plug-in of NCCL exports beside NCCL's own table.
 *
 * The library is named to NCCL by its path, and its network by its name:
 *
 *     NCCL_NET_PLUGIN=/path/libmuster-nccl.so  NCCL_NET=MusterSealed
 *
 * NCCL then refuses every other network. NCCL must be started only after muster_nccl_self_test() has answered 0 and the
 * secret is there: NCCL 2.28 ends in a segmentation fault where a plug-in's init fails.
 *
 * Built of all .c files of this folder, with one call of the compiler (Linux, C11, OpenSSL 3.0 or newer):
 *
 *     cc -std=c11 -O2 -shared -fPIC -fvisibility=hidden -fstack-protector-strong -D_FORTIFY_SOURCE=2 \
 *        -o libmuster-nccl.so *.c -Wl,-z,nodelete -Wl,-z,relro -Wl,-z,now -lcrypto -lpthread
 *
 * Where a process's secret comes from, in this order:
 *
 *   1. muster_nccl_use_secret(), for a process that holds its session itself.
 *   2. MS_NCCL_SECRET_FD=<number>: an inherited memfd, sealed with F_SEAL_WRITE, F_SEAL_SHRINK, F_SEAL_GROW and
 *      F_SEAL_SEAL, that holds 48 bytes: "MSNCCLK1", the generation as 64 bits little-endian, 32 bytes of secret. It is
 *      read with pread, at init and again where a newer generation is needed. It stays open: the reader does not own it.
 *
 * Other environment, read at init:
 *
 *   MS_NCCL_CONNECTIONS     TCP connections of a communicator, 1 to 16; 4 where unset. The side that connects decides.
 *   MS_NCCL_ACCEPT_TIMEOUT  seconds, 1 to 86400, that accept and connect wait for the other side; 120 where unset.
 *   NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY   as NCCL reads them.
 *
 * A value that cannot be read ends init with an error, and the reason says which.
 */
#ifndef MUSTER_NCCL_H
#define MUSTER_NCCL_H

#include <stddef.h>
#include <stdint.h>

#define MUSTER_NCCL_SECRET_SIZE 32
#define MUSTER_NCCL_NET_NAME "MusterSealed"
#define MUSTER_NCCL_MEMFD_MAGIC "MSNCCLK1" /* 8 bytes, without the final zero */
#define MUSTER_NCCL_MEMFD_SIZE 48

#if defined(__GNUC__)
#define MUSTER_NCCL_EXPORT __attribute__((visibility("default")))
#else
#define MUSTER_NCCL_EXPORT
#endif

/* Uses this secret, of this generation, for all connections from now on, and wipes the one before.
 *
 * To be called before each generation's communicator is built. The 32 bytes are copied; the caller wipes its own. What
 * is connected stays so; listeners of another generation refuse who comes. Any thread may call it.
 * Returns 0, or -1 where `secret` is NULL or no memory can be kept for it (muster_nccl_reason() says so). */
MUSTER_NCCL_EXPORT int muster_nccl_use_secret(uint64_t generation, const unsigned char secret[32]);

/* Writes why a communicator of this process was last ended, or refused: one plain sentence, UTF-8, at most 511 bytes,
 * that ends with a zero. It names the peer's address, what was wrong, and the remedy; never key material.
 *
 * "" where there was none. A text that does not fit into `size` is cut. Returns the whole text's length in bytes,
 * without the zero; -1 where `buffer` is NULL or `size` is 0. Any thread may call it. */
MUSTER_NCCL_EXPORT int muster_nccl_reason(char *buffer, size_t size);

/* Forgets that reason: what muster_nccl_reason() says afterwards happened afterwards. */
MUSTER_NCCL_EXPORT void muster_nccl_forget_reason(void);

/* Says whether this library can seal on this machine: 0, or -1 with a sentence that says what is missing.
 *
 * Seals and opens with both ciphers, exchanges a key, derives one with HKDF, and compares what has a known result.
 * Needs no secret, opens no socket, starts no thread: fit to be asked in a process of its own before NCCL is started. */
MUSTER_NCCL_EXPORT int muster_nccl_self_test(char *buffer, size_t size);

/* Names plug-in, protocol and the libcrypto in use: "MusterSealed protocol 1, OpenSSL 3.0.19". Never freed. */
MUSTER_NCCL_EXPORT const char *muster_nccl_version(void);

#endif
