// Waits that sleep, for LD_PRELOAD if ranks outnumber cores.
//
// MPI libraries and Horovod wait by calling sched_yield() in a loop. With two such threads per rank and several ranks
// per core, each yield only passes the core to the next waiting thread, and the thread that all wait for is delayed: 8
// ranks on 2 cores spent 60 % of the time in the kernel, and 140 steps of 68 ms took up to 54 s (docs/results.md,
// "Scale"). A waiting thread that sleeps leaves the core to working threads. It adds up to one nap to the
// latency of every message.
//
// Debian's MPICH does not even yield: it polls UCX, and lets its lock go between two polls. There the nap is, after
// some polls in vain, outside of the lock, which other threads of the rank need.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

enum { kMostInVain = 20 };

static __thread int num_in_vain;  // polls of this thread since its last nap, or since one found something

static void nap(void) {
  const struct timespec duration = {0, 100000};
  nanosleep(&duration, 0);
}

int sched_yield(void) {
  nap();
  return 0;
}

unsigned ucp_worker_progress(void* worker) {
  static unsigned (*of_ucx)(void*);
  if (!of_ucx) {  // among the libraries of the caller, as no global name leads there
    Dl_info caller;
    dladdr(__builtin_return_address(0), &caller);
    of_ucx = (unsigned (*)(void*))dlsym(dlopen(caller.dli_fname, RTLD_LAZY | RTLD_NOLOAD), __func__);
  }
  const unsigned num_events = of_ucx(worker);
  num_in_vain = num_events ? 0 : num_in_vain + 1;
  return num_events;
}

int pthread_mutex_unlock(pthread_mutex_t* mutex) {
  static int (*of_libc)(pthread_mutex_t*);
  if (!of_libc) of_libc = (int (*)(pthread_mutex_t*))dlsym(RTLD_NEXT, __func__);
  const int error = of_libc(mutex);
  if (num_in_vain >= kMostInVain) {
    num_in_vain = 0;
    nap();
  }
  return error;
}
