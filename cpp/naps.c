// Waits that sleep, for LD_PRELOAD if ranks outnumber cores.
//
// MPI libraries and Horovod wait by calling sched_yield() in a loop. With two such threads per rank and several ranks
// per core, each yield only passes the core to the next waiting thread, and the thread that all wait for is delayed: 8
// ranks on 2 cores spent 60 % of the time in the kernel, and 140 steps of 68 ms took up to 54 s. A waiting thread that
// sleeps leaves the core to working threads. It adds up to one nap to the latency of every message.
//
// Debian's MPICH does not even yield (docs/results.md, "Scale"): it polls UCX in a loop, and unlocks its lock after
// each poll. After some polls in vain a thread naps at the unlock: other threads of the rank need the lock meanwhile.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { kMostInVain = 20 };
typedef unsigned Progress(void* worker);
typedef int Unlock(pthread_mutex_t* mutex);

// Polls of this thread since its last nap, or since one that found something, at most kMostInVain.
static __thread int num_in_vain __attribute__((tls_model("initial-exec")));

static void nap(void) {
  const struct timespec duration = {0, 100000};
  const int error = errno;
  nanosleep(&duration, 0);
  errno = error;
  num_in_vain = 0;
}

int sched_yield(void) {
  nap();
  return 0;
}

// UCX's own, where the library that calls it finds it, or under its usual name.
static Progress* progress_of(const void* caller, const void* wrapper) {
  Dl_info library;
  const int flags = RTLD_LAZY | RTLD_NOLOAD;
  const int has_name = dladdr(caller, &library) && library.dli_fname;
  void* places[] = {has_name ? dlopen(library.dli_fname, flags) : 0, dlopen("libucp.so.0", flags), RTLD_NEXT};
  for (int i = 0; i < 3; ++i) {
    void* found = places[i] ? dlsym(places[i], "ucp_worker_progress") : 0;
    if (found && found != wrapper) return (Progress*)found;
  }
  fputs("hetmpi: ucp_worker_progress() of UCX is not found: start at most as many ranks as there are cores\n", stderr);
  abort();
}

unsigned ucp_worker_progress(void* worker) {
  static Progress* of_ucx;
  if (!of_ucx) of_ucx = progress_of(__builtin_return_address(0), (const void*)&ucp_worker_progress);
  const unsigned num_events = of_ucx(worker);
  if (num_events) {
    num_in_vain = 0;
  } else if (num_in_vain < kMostInVain) {
    ++num_in_vain;
  }
  return num_events;
}

int pthread_mutex_unlock(pthread_mutex_t* mutex) {
  static Unlock* of_libc;
  if (!of_libc) of_libc = (Unlock*)dlsym(RTLD_NEXT, "pthread_mutex_unlock");
  const int error = of_libc(mutex);
  if (num_in_vain == kMostInVain) nap();
  return error;
}
