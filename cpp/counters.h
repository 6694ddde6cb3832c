// Counters: operations and traffic of one rank's table (hetmpi/counters.py, which says what each is).
#pragma once

#include <cstdint>

namespace hetmpi {

struct Counters {
  int64_t hits = 0, stale = 0, misses = 0, validated = 0, evicted = 0, pushed = 0;
  int64_t clock_bytes = 0, row_bytes = 0, push_bytes = 0;
  int64_t pages_read = 0, pages_written = 0, disk_steps = 0;
};

}  // namespace hetmpi
