// A sched_yield() that sleeps, for LD_PRELOAD if ranks outnumber cores.
//
// MPI libraries and Horovod wait by calling sched_yield() in a loop. With two such threads per rank and several ranks
// per core, each yield only passes the core to the next waiting thread, and the thread that all wait for is delayed: 8
// ranks on 2 cores spent 60 % of the time in the kernel, and 140 steps of 68 ms took up to 54 s (docs/results.md,
// "Scale"). A waiting thread that sleeps leaves the core to working threads. It adds up to one nap to the
// latency of every message.
#include <time.h>

int sched_yield(void) {
  const struct timespec nap = {0, 100000};
  nanosleep(&nap, 0);
  return 0;
}
