// What follows for the keys of a pull from its lines, the owners' clocks and the rows that have come.
#pragma once

#include <cstdint>
#include <cstring>

namespace hetmpi {

struct JudgedCounts {
  int64_t num_found, num_stale, num_missing;  // lines, those to refresh, rows to be read
};

// What is done for keys (n) with lines (slots >= 0), rows that came (fetched), and keys whose need for a row is decided
// already. is_stale: lines that are too old; becomes those that are refreshed: lines whose rows came, and stale ones
// unless it is decided that they are not read now. is_missing: keys whose rows are to be read now.
inline JudgedCounts decide(const int64_t* slots, const uint8_t* fetched, const uint8_t* is_decided, int64_t n,
                           uint8_t* is_stale, uint8_t* is_missing) {
  JudgedCounts judged{0, 0, 0};
  for (int64_t i = 0; i < n; ++i) {
    const bool is_line = slots[i] >= 0;
    is_stale[i] = fetched[i] ? is_line : is_stale[i] && !is_decided[i];
    is_missing[i] = !fetched[i] && !is_decided[i] && (!is_line || is_stale[i]);
    judged.num_found += is_line;
    judged.num_stale += is_stale[i];
    judged.num_missing += is_missing[i];
  }
  return judged;
}

// The keys (m) of a pull that serves several batches: their lines, clocks, and rows (m, dim) of those that got no line
// but are here (is_uncached).
struct PulledKeys {
  const int64_t* slots;
  const int32_t* clocks;
  const uint8_t* is_uncached;
  const float* rows;
  int64_t dim;
};

struct PartCounts {
  int64_t num_missing;   // keys with neither a line nor a row
  int64_t num_repeated;  // admitted keys at places below first_new: they are in a batch read before
  int64_t num_hits;      // and those of them with a line
};

// One of these batches (n): places of its keys in the pull. Sets slots, clocks, the rows (n, dim) that are here, and
// is_missing.
inline PartCounts part_of_pull(const PulledKeys& pull, const int64_t* places, const uint8_t* is_admitted,
                               int64_t first_new, int64_t n, int64_t* slots, int32_t* clocks, float* rows,
                               uint8_t* is_missing) {
  PartCounts counts{0, 0, 0};
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = places[i];
    slots[i] = pull.slots[at];
    clocks[i] = pull.clocks[at];
    const bool has_line = slots[i] >= 0, is_repeated = is_admitted[i] && at < first_new;
    is_missing[i] = !has_line && !pull.is_uncached[at];
    counts.num_missing += is_missing[i];
    counts.num_repeated += is_repeated;
    counts.num_hits += is_repeated && has_line;
    if (pull.is_uncached[at]) std::memcpy(rows + i * pull.dim, pull.rows + at * pull.dim, pull.dim * sizeof(float));
  }
  return counts;
}

}  // namespace hetmpi
