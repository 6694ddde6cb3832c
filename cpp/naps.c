// A sched_yield() that naps, for LD_PRELOAD where ranks outnumber cores.
//
// MPI libraries and Horovod wait by calling sched_yield() in a loop. With two such threads per rank and several ranks
// on a core, each yield only hands the core to the next waiting thread, and the thread that all wait for gets its turn
// late: 8 ranks on 2 cores spent 60 % of the time in the kernel, and steps of 70 ms took up to 490 (docs/results.md).
// A waiting thread that sleeps leaves the core to those with work. It costs up to a nap on every message.
#include <time.h>

int sched_yield(void) {
  const struct timespec nap = {0, 100000};
  nanosleep(&nap, 0);
  return 0;
}
