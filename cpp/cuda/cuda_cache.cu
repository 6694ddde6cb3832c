// Kernels of CudaRowCache. Decisions about one key, line or row are in cache/cache_decisions.h and
// owner/row_optimizer.h, shared with the CPU. Where the order of a batch matters, as within a set, one warp processes
// that set's keys in the order of the batch.
#include "cuda/cuda_cache.h"

#include <algorithm>
#include <cub/cub.cuh>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "cuda/cache_streams.h"
#include "cuda/device.h"

namespace hetmpi {
namespace {

constexpr int kLeastCapability = 8;  // setup.py compiles for it and later ones
using Counter = unsigned long long;

struct Line {
  int32_t clock, age, count;
  float moved;  // of Drift
};

// The line of an entry when its rows are to be changed: decisions may have gone on by the time they are.
struct Seen {
  int64_t key;
  int32_t clock, age, count;
};

// A pending sum to be pushed: its key and its slot; -1 for none.
struct Gone {
  int64_t key, slot;
  int32_t clock;
  Iterations of;
};

// View of the cache for kernels. Arrays by slot, as in RowCache; pending sums are indexed by slot too. A line has a
// pending sum if count > 0; before its first gradient the memory of the sum is undefined.
struct Lines {
  uint8_t* tag;
  int64_t* key;
  uint64_t* worth;
  Line* line;
  Steps* steps;    // first and last step of the pending sum
  uint32_t* late;  // the call of due() whose late sum of the line may not have left; 0 for none
  void* weight;    // of `type`
  float *state, *pending;
  RowType type;
  int64_t num_sets;
  int ways;
  uint32_t now;
  int32_t step;
  Policy policy;
  RowOptimizer optimizer;
  Drift* drift;  // null without a limit

  __device__ int64_t first_slot(uint64_t hash) const { return static_cast<int64_t>(set_of(hash, num_sets)) * kWays; }
  __device__ Gone gone(int64_t slot) const {
    return {key[slot], slot, line[slot].clock, {line[slot].count, steps[slot]}};
  }
  __device__ float* floats_of(int64_t slot) const { return static_cast<float*>(weight) + slot * optimizer.dim(); }
  __device__ uint16_t* halves_of(int64_t slot) const { return static_cast<uint16_t*>(weight) + slot * optimizer.dim(); }
  __device__ HalfRow half_row(int64_t slot, const Seen& seen) const {
    return HalfRow(halves_of(slot), type, row_seed(seen.key, seen.clock));
  }
  __device__ float* state_of(int64_t slot) const { return state + slot * optimizer.preview_dim(); }
  __device__ float* pending_of(int64_t slot) const { return pending + slot * optimizer.sum_dim(); }
};

// Counters in GPU memory.
struct Counted {
  Counter inserted, evicted, opened, stale;
  Counter lags[LagHistogram::kBins];
};

// What the host reads of lines whose sums leave: their number, and that of all lines evicted so far.
struct Told {
  int64_t num_flagged, num_evicted;
};

// Adds the number of lanes with `is_so`. REQUIRES: all lanes of the warp call it.
__device__ void count(Counter* counter, bool is_so) {
  const unsigned lanes = __ballot_sync(kAll, is_so);
  if (lane_number() == 0 && lanes != 0) atomicAdd(counter, static_cast<Counter>(__popc(lanes)));
}

// Copies from (n) to to (n) with a warp, 16 bytes at a time if both are aligned.
__device__ void copy(float* to, const float* from, int64_t n, int lane) {
  if (n % 4 == 0 && (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % sizeof(float4) == 0) {
    for (int64_t c = lane; c < n / 4; c += kWarp)
      reinterpret_cast<float4*>(to)[c] = reinterpret_cast<const float4*>(from)[c];
  } else {
    for (int64_t d = lane; d < n; d += kWarp) to[d] = from[d];
  }
  __syncwarp();  // the next reader may be another lane
}

// Stores a row to a line, with a warp.
__device__ void set_row(const Lines& lines, int64_t slot, const float* row, int lane) {
  const int64_t dim = lines.optimizer.dim();
  if (lines.type == RowType::kFloat32) return copy(lines.floats_of(slot), row, dim, lane);
  for (int64_t d = lane; d < dim; d += kWarp) lines.halves_of(slot)[d] = narrowed(row[d], lines.type, kNearest);
  __syncwarp();
}

// Bit i: whether way i of a set has this tag. tags: 16-byte aligned.
__device__ uint32_t ways_tagged(const uint8_t* tags, uint8_t tag) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(tags);
  const uint32_t wanted = tag * 0x01010101u;
  uint32_t ways = 0;
  for (int w = 0; w < kWays / 4; ++w) {
    const uint32_t other = words[w] ^ wanted;
    const uint32_t equal =
        ~(((other & 0x7f7f7f7fu) + 0x7f7f7f7fu) | other | 0x7f7f7f7fu);  // 0x80 in bytes that are equal
    ways |= (((equal >> 7) * 0x01020408u) >> 24 & 0xfu) << (4 * w);
  }
  return ways;
}

// found: the number of keys with a line is added to it; may be null.
__global__ void look_up_kernel(Lines lines, const int64_t* keys, int64_t n, int64_t* slots, Counter* found) {
  const int64_t i = thread_number();
  int64_t slot = -1;
  if (i < n) {
    const int64_t key = keys[i];
    const uint64_t hash = mix64(static_cast<uint64_t>(key));
    const int64_t first = lines.first_slot(hash);
    for (uint32_t ways = ways_tagged(lines.tag + first, tag_of(hash)); ways != 0 && slot < 0; ways &= ways - 1) {
      const int64_t candidate = first + __ffs(static_cast<int>(ways)) - 1;
      if (lines.key[candidate] == key) slot = candidate;
    }
    slots[i] = slot;
  }
  if (found != nullptr) count(found, slot >= 0);
}

// One thread. Moves a counter to the host's memory.
__global__ void move_kernel(Counter* counter, int64_t* num) {
  if (thread_number() != 0) return;
  *num = static_cast<int64_t>(*counter);
  *counter = 0;
}

__global__ void use_kernel(Lines lines, const int64_t* slots, int64_t n) {
  const int64_t i = thread_number();
  if (i >= n || slots[i] < 0) return;
  uint64_t& worth = lines.worth[slots[i]];
  worth = next_worth(lines.policy, worth, lines.now);
}

__global__ void forget_kernel(Lines lines, const int64_t* slots, int64_t n, Counted* counted) {
  const int64_t i = thread_number();
  if (i >= n || slots[i] < 0) return;
  lines.tag[slots[i]] = 0;
  lines.worth[slots[i]] = 0;
  atomicAdd(&counted->inserted, static_cast<Counter>(-1));  // modulo 2^64
}

__global__ void age_kernel(Lines lines, int64_t num_slots) {
  const int64_t slot = thread_number();
  if (slot < num_slots) lines.worth[slot] = aged_worth(lines.worth[slot]);
}

// The clocks of keys in the shards of their owners, which write them meanwhile.
__global__ void read_clocks_kernel(Partition partition, const int32_t* const* shards, const int64_t* keys, int64_t n,
                                   int32_t* clocks) {
  const int64_t i = thread_number();
  if (i >= n) return;
  const Place place = partition.locate(keys[i]);
  clocks[i] = *static_cast<const volatile int32_t*>(shards[place.owner] + place.row);
}

// late_call: of due(), whose sums have not left, while the owners' clocks will be at least those of their lines once
// they have; 0 for none. num_stale: added to.
__global__ void validate_kernel(Lines lines, const int64_t* slots, int32_t* owner_clocks, int64_t n, int64_t staleness,
                                uint32_t late_call, uint8_t* is_stale, Counter* num_stale, bool counts_lags,
                                Counted* counted) {
  const int64_t i = thread_number();
  bool stale = false;
  int bin = -1;
  if (i < n && slots[i] >= 0 && staleness != kUnbounded) {
    const Line line = lines.line[slots[i]];
    const bool is_late = late_call != 0 && lines.late[slots[i]] == late_call;
    if (is_late && owner_clocks[i] < line.clock) owner_clocks[i] = line.clock;
    stale = !is_valid(owner_clocks[i], line.clock, line.age, staleness);
    if (!stale && counts_lags) bin = LagHistogram::bin_of(static_cast<int64_t>(owner_clocks[i]) - line.clock);
  }
  if (i < n) is_stale[i] = stale;
  count(&counted->stale, stale);
  count(num_stale, stale);
  for (unsigned left = __ballot_sync(kAll, bin >= 0); left != 0;) {
    const int leader = __ffs(static_cast<int>(left)) - 1, its = __shfl_sync(kAll, bin, leader);
    const unsigned same = __ballot_sync(kAll, bin == its);
    if (lane_number() == leader) atomicAdd(&counted->lags[its], static_cast<Counter>(__popc(same)));
    left &= ~same;
  }
}

// seen (n): of lines that are refreshed.
__global__ void renew_kernel(Lines lines, const int64_t* slots, const uint8_t* chosen, const int32_t* clocks, int64_t n,
                             Seen* seen) {
  const int64_t i = thread_number();
  if (i >= n || slots[i] < 0 || !chosen[i]) return;
  Line& line = lines.line[slots[i]];
  line = {clocks[i] + line.count, 0, line.count, 0};
  seen[i] = {lines.key[slots[i]], line.clock, line.age, line.count};
}

// A warp per entry.
__global__ void refresh_kernel(Lines lines, const int64_t* slots, const uint8_t* chosen, const Seen* seen,
                               const float* weights, const float* states, int64_t n, float anticipate) {
  const int64_t i = warp_number();
  if (i >= n || slots[i] < 0 || !chosen[i]) return;
  const int64_t slot = slots[i], dim = lines.optimizer.dim(), preview_dim = lines.optimizer.preview_dim();
  const int lane = lane_number();
  set_row(lines, slot, weights + i * dim, lane);
  if (preview_dim > 0) copy(lines.state_of(slot), states + i * preview_dim, preview_dim, lane);
  const int32_t count = seen[i].count;
  if (count == 0) return;
  float *pending = lines.pending_of(slot), *squares = pending + dim;
  if (count == 1) {
    lines.optimizer.square(squares, pending, Together{lane});
    __syncwarp();
  }
  const Gradient sum = lines.optimizer.summed(pending, squares, count, anticipate);
  if (lines.type == RowType::kFloat32)
    lines.optimizer.preview(lines.floats_of(slot), lines.state_of(slot), sum, Together{lane});
  else
    lines.optimizer.preview(lines.half_row(slot, seen[i]), lines.state_of(slot), sum, Together{lane});
}

// Set of each key that needs a line, num_sets for the others, and the keys' indices: the input of the sort. is_placed,
// flags (n): 0.
__global__ void wanted_sets_kernel(Lines lines, const int64_t* keys, const uint8_t* chosen, const int64_t* slots,
                                   int64_t n, uint32_t* sets, int32_t* numbers, uint8_t* is_placed, int32_t* flags) {
  const int64_t i = thread_number();
  if (i >= n) return;
  const bool wants = slots[i] < 0 && chosen[i];
  const uint64_t hash = mix64(static_cast<uint64_t>(keys[i]));
  sets[i] = static_cast<uint32_t>(wants ? set_of(hash, lines.num_sets) : lines.num_sets);
  numbers[i] = static_cast<int32_t>(i);
  is_placed[i] = 0;
  flags[i] = 0;
}

// One warp per key, sorted by set; the warp of a set's first key processes all keys of the set. gone (n): pending sums
// of evicted lines, where flags (n) are 1. is_placed (n): whether the key got a line.
__global__ void place_kernel(Lines lines, const uint32_t* sets, const int32_t* numbers, int64_t n, const int64_t* keys,
                             const int32_t* clocks, int64_t* slots, uint8_t* is_placed, Gone* gone, int32_t* flags,
                             Counted* counted) {
  const int64_t begin = warp_number();
  if (begin >= n) return;
  const uint32_t set = sets[begin];
  if (set == lines.num_sets) return;
  if (begin > 0 && sets[begin - 1] == set) return;
  const int lane = lane_number();
  const bool is_way = lane < lines.ways;
  const int64_t own = static_cast<int64_t>(set) * kWays + lane;  // slot of this lane
  uint8_t tag = lines.tag[own];
  uint64_t worth = lines.worth[own];
  Counter num_empty = 0, num_evicted = 0;
  for (int64_t at = begin; at < n && sets[at] == set; ++at) {
    const int32_t i = numbers[at];
    const unsigned empty = __ballot_sync(kAll, is_way && tag == 0);
    const bool may_go = is_way && last_use_in(worth) != lines.now;
    uint64_t least = may_go ? worth : UINT64_MAX;
    for (int half = kWarp / 2; half > 0; half /= 2) least = min(least, __shfl_xor_sync(kAll, least, half));
    const unsigned victims = __ballot_sync(kAll, may_go && worth == least);
    const unsigned chosen = empty != 0 ? empty : victims;
    if (chosen == 0) continue;  // all lines are used in this iteration
    const int way = __ffs(static_cast<int>(chosen)) - 1;
    (empty != 0 ? num_empty : num_evicted) += 1;
    if (lane != way) continue;
    Line& line = lines.line[own];
    if (line.count > 0) {
      gone[i] = lines.gone(own);
      flags[i] = 1;
    }
    lines.tag[own] = tag = tag_of(mix64(static_cast<uint64_t>(keys[i])));
    lines.key[own] = keys[i];
    lines.worth[own] = worth = first_worth(lines.policy, lines.now);
    line = {clocks[i], 0, 0, 0};
    lines.late[own] = 0;
    slots[i] = own;
    is_placed[i] = 1;
  }
  if (lane != 0) return;
  if (num_empty > 0) atomicAdd(&counted->inserted, num_empty);
  if (num_evicted > 0) atomicAdd(&counted->evicted, num_evicted);
}

// A warp per entry.
__global__ void fill_kernel(Lines lines, const uint8_t* is_placed, const int64_t* slots, const float* weights,
                            const float* states, int64_t n) {
  const int64_t i = warp_number();
  if (i >= n || !is_placed[i]) return;
  const int64_t dim = lines.optimizer.dim(), preview_dim = lines.optimizer.preview_dim();
  set_row(lines, slots[i], weights + i * dim, lane_number());
  if (preview_dim > 0) copy(lines.state_of(slots[i]), states + i * preview_dim, preview_dim, lane_number());
}

// Address of the row of entry i, with `width` elements; null if it has none.
template <typename T>
__device__ const T* row_of(const T* weight, const T* others, int64_t width, const int64_t* slots, int64_t i) {
  if (slots[i] >= 0) return weight + slots[i] * width;
  return others == nullptr ? nullptr : others + i * width;
}

// kTile lanes per row of `quads` times 16 bytes, kRows consecutive rows with overlapping loads.
template <int kTile, int kRows>
__global__ void gather_quads_kernel(const float4* weight, const float4* others, int64_t quads, const int64_t* slots,
                                    int64_t n, float4* out) {
  const int64_t begin = thread_number() / kTile * kRows;
  const int lane = threadIdx.x % kTile;
  const float4* from[kRows];
  for (int k = 0; k < kRows; ++k) from[k] = begin + k < n ? row_of(weight, others, quads, slots, begin + k) : nullptr;
  for (int64_t c = lane; c < quads; c += kTile) {
    float4 row[kRows];
    for (int k = 0; k < kRows; ++k)
      if (from[k] != nullptr) row[k] = from[k][c];
    for (int k = 0; k < kRows; ++k)
      if (from[k] != nullptr) out[(begin + k) * quads + c] = row[k];
  }
}

struct alignas(8) FourHalves {
  uint16_t of[4];
};

// kTile lanes per row of `quads` times 4 16-bit numbers, widened to 32 bits; rows of `others` have 32 bits.
template <int kTile>
__global__ void gather_halves_kernel(const FourHalves* weight, RowType type, const float4* others, int64_t quads,
                                     const int64_t* slots, int64_t n, float4* out) {
  const int64_t i = thread_number() / kTile;
  if (i >= n) return;
  const float4* other = others == nullptr ? nullptr : others + i * quads;
  for (int64_t c = threadIdx.x % kTile; c < quads; c += kTile) {
    if (slots[i] >= 0) {
      const FourHalves four = weight[slots[i] * quads + c];
      out[i * quads + c] = {widened(four.of[0], type), widened(four.of[1], type), widened(four.of[2], type),
                            widened(four.of[3], type)};
    } else if (other != nullptr) {
      out[i * quads + c] = other[c];
    }
  }
}

// A warp per entry.
__global__ void gather_kernel(Lines lines, const float* others, const int64_t* slots, int64_t n, float* out) {
  const int64_t i = warp_number(), dim = lines.optimizer.dim();
  if (i >= n) return;
  if (slots[i] >= 0 && lines.type != RowType::kFloat32) {
    const uint16_t* row = lines.halves_of(slots[i]);
    for (int64_t d = lane_number(); d < dim; d += kWarp) out[i * dim + d] = widened(row[d], lines.type);
    return;
  }
  const float* from = row_of(static_cast<const float*>(lines.weight), others, dim, slots, i);
  if (from != nullptr) copy(out + i * dim, from, dim, lane_number());
}

// The part of an update that concerns clocks. seen (n): of the lines.
__global__ void tick_kernel(Lines lines, const int64_t* slots, int64_t n, Seen* seen, Counted* counted) {
  const int64_t i = thread_number();
  bool opens = false;
  if (i < n && slots[i] >= 0) {
    Line line = lines.line[slots[i]];
    opens = line.count == 0;
    line = {line.clock + 1, next_age(line.age), line.count + 1, line.moved};
    lines.line[slots[i]] = line;
    lines.steps[slots[i]] = {opens ? lines.step : lines.steps[slots[i]].first, lines.step};
    seen[i] = {lines.key[slots[i]], line.clock, line.age, line.count};
  }
  count(&counted->opened, opens);
}

__device__ float4 minus(float4 a, float step, float4 b) {
  return {a.x - step * b.x, a.y - step * b.y, a.z - step * b.z, a.w - step * b.w};
}

// pending += grads and weight -= step * grads, kTile lanes per row.
template <int kTile, int kRows>
__global__ void add_and_subtract_kernel(float4* weight, float4* pending, float step, int64_t quads,
                                        const int64_t* slots, const Seen* seen, const float4* grads, int64_t n) {
  const int64_t begin = thread_number() / kTile * kRows;
  const int lane = threadIdx.x % kTile;
  int64_t slot[kRows];
  bool first[kRows];
  for (int k = 0; k < kRows; ++k) {
    slot[k] = begin + k < n ? slots[begin + k] : -1;
    first[k] = slot[k] >= 0 && seen[begin + k].count == 1;
  }
  for (int64_t c = lane; c < quads; c += kTile) {
    float4 grad[kRows], row[kRows], sum[kRows];
    for (int k = 0; k < kRows; ++k) {
      if (slot[k] < 0) continue;
      const int64_t place = slot[k] * quads + c;
      grad[k] = grads[(begin + k) * quads + c];
      row[k] = weight[place];
      sum[k] = first[k] ? float4{0, 0, 0, 0} : pending[place];
    }
    for (int k = 0; k < kRows; ++k) {
      if (slot[k] < 0) continue;
      const int64_t place = slot[k] * quads + c;
      pending[place] = plus(sum[k], grad[k]);
      weight[place] = minus(row[k], step, grad[k]);
    }
  }
}

// One warp per entry, for any rule.
__global__ void update_kernel(Lines lines, const int64_t* slots, const Seen* seen, const float* grads, int64_t n,
                              float anticipate) {
  const int64_t i = warp_number();
  if (i >= n || slots[i] < 0) return;
  const Together loop{lane_number()};
  float* pending = lines.pending_of(slots[i]);
  if (seen[i].count == 1) {  // squares too: released sums are checked for NaN
    loop.each(lines.optimizer.sum_dim(), [=](int64_t d) { pending[d] = 0; });
    __syncwarp();
  }
  const float* grad = grads + i * lines.optimizer.dim();
  float* state = lines.state_of(slots[i]);
  const Seen now = seen[i];
  const int32_t own = updates_unseen(now.age, now.count);
  if (lines.type == RowType::kFloat32)
    lines.optimizer.add_and_preview(pending, now.count - 1, lines.floats_of(slots[i]), state, grad, anticipate, own,
                                    loop);
  else
    lines.optimizer.add_and_preview(pending, now.count - 1, lines.half_row(slots[i], now), state, grad, anticipate, own,
                                    loop);
  if (lines.drift == nullptr) return;
  __syncwarp();
  const float step = lines.optimizer.step_square(state, grad, own, loop);
  const int64_t dim = lines.optimizer.dim();
  const auto sum_of_squares = [&](auto row) { return loop.sum(dim, [=](int64_t d) { return row[d] * row[d]; }); };
  const float square = lines.type == RowType::kFloat32 ? sum_of_squares(lines.floats_of(slots[i]))
                                                       : sum_of_squares(lines.half_row(slots[i], now));
  if (loop.lane != 0) return;
  Line& line = lines.line[slots[i]];
  line.moved += step;
  if (lines.drift->is_exceeded(line.moved, line.age)) line.age = kDrifted;
  atomicAdd(reinterpret_cast<Counter*>(&lines.drift->total),
            static_cast<Counter>(Drift::units_of(square / static_cast<float>(dim))));
  atomicAdd(reinterpret_cast<Counter*>(&lines.drift->count), Counter{1});
}

// One thread.
__global__ void begin_kernel(Drift* drift) {
  if (thread_number() == 0) drift->begin();
}

__global__ void clocks_within_kernel(Lines lines, const int64_t* slots, int64_t n, bool will_write, int64_t staleness,
                                     int32_t* clocks) {
  const int64_t i = thread_number();
  if (i >= n) return;
  clocks[i] = kNoLine;
  if (slots[i] < 0) return;
  const Line line = lines.line[slots[i]];
  const bool is_written = will_write && last_use_in(lines.worth[slots[i]]) == lines.now;
  if (is_young(line.age, is_written, staleness)) clocks[i] = line.clock;
}

__global__ void look_at_kernel(Lines lines, const int64_t* slots, int64_t n, int32_t* clocks, int32_t* counts) {
  const int64_t i = thread_number();
  if (i >= n) return;
  clocks[i] = slots[i] < 0 ? -1 : lines.line[slots[i]].clock;
  counts[i] = slots[i] < 0 ? -1 : lines.line[slots[i]].count;
}

__global__ void without_line_kernel(const int64_t* slots, int64_t n, int32_t* flags) {
  const int64_t i = thread_number();
  if (i < n) flags[i] = slots[i] < 0;
}

// Finds the pending sums that are due, among slots (n), or among all from first_slot on if slots is null.
__global__ void due_kernel(Lines lines, const int64_t* slots, int64_t first_slot, int64_t n, int64_t staleness,
                           Gone* gone, int32_t* flags) {
  const int64_t i = thread_number();
  if (i >= n) return;
  flags[i] = 0;
  const int64_t slot = slots == nullptr ? first_slot + i : slots[i];
  if (slot < 0) return;
  const Line line = lines.line[slot];
  const bool goes = slots == nullptr ? line.count > 0 : is_due(line.count, line.age, staleness);
  if (!goes) return;
  gone[i] = lines.gone(slot);
  flags[i] = 1;
}

// One thread. The number of the flagged of n entries, of which `at` has the number before each; and of evicted lines.
__global__ void tell_kernel(const int32_t* flags, const int32_t* at, int64_t n, const Counted* counted, Told* told) {
  if (thread_number() == 0) *told = {at[n - 1] + flags[n - 1], static_cast<int64_t>(counted->evicted)};
}

// late_call: 0 if the sums leave at once.
__global__ void close_kernel(Lines lines, const Gone* gone, const int32_t* flags, int64_t n, uint32_t late_call) {
  const int64_t i = thread_number();
  if (i >= n || !flags[i]) return;
  lines.line[gone[i].slot].count = 0;
  if (late_call != 0) lines.late[gone[i].slot] = late_call;
}

// Columns of `num` released sums in one block of memory.
struct Out {
  int64_t* keys;
  Steps* steps;
  int32_t *clocks, *counts;
  float* sums;

  Out(void* block, int64_t num) {
    keys = static_cast<int64_t*>(block);
    steps = reinterpret_cast<Steps*>(keys + num);
    clocks = reinterpret_cast<int32_t*>(steps + num);
    counts = clocks + num;
    sums = reinterpret_cast<float*>(static_cast<char*>(block) + sums_at(num));
  }
  static int64_t num_bytes(int64_t num, int64_t sum_dim) {
    return sums_at(num) + num * sum_dim * static_cast<int64_t>(sizeof(float));
  }

 private:
  static int64_t sums_at(int64_t num) {  // aligned for copy()
    const auto before = num * static_cast<int64_t>(sizeof(int64_t) + sizeof(Steps) + 2 * sizeof(int32_t));
    constexpr int64_t kUnit = sizeof(float4);
    return (before + kUnit - 1) / kUnit * kUnit;
  }
};

// One warp per entry: flagged entries are written to index `at`.
__global__ void release_pending_kernel(Lines lines, const Gone* gone, const int32_t* flags, const int32_t* at,
                                       int64_t n, Out out) {
  const int64_t i = warp_number();
  if (i >= n || !flags[i]) return;
  const int64_t place = at[i], sum_dim = lines.optimizer.sum_dim();
  copy(out.sums + place * sum_dim, lines.pending_of(gone[i].slot), sum_dim, lane_number());
  if (lane_number() != 0) return;
  out.keys[place] = gone[i].key;
  out.clocks[place] = gone[i].clock;
  out.counts[place] = gone[i].of.count;
  out.steps[place] = gone[i].of.steps;
}

// One warp per entry: gradients of flagged entries, as sums over one iteration.
__global__ void release_directly_kernel(RowOptimizer optimizer, int32_t step, const int64_t* keys,
                                        const int32_t* clocks, const float* grads, const int32_t* flags,
                                        const int32_t* at, int64_t n, Out out) {
  const int64_t i = warp_number();
  if (i >= n || !flags[i]) return;
  const Together loop{lane_number()};
  float* sums = out.sums + at[i] * optimizer.sum_dim();
  loop.each(optimizer.sum_dim(), [=](int64_t d) { sums[d] = 0; });
  __syncwarp();
  optimizer.add(sums, 0, grads + i * optimizer.dim(), loop);
  if (loop.lane != 0) return;
  out.keys[at[i]] = keys[i];
  out.clocks[at[i]] = next_clock(clocks[i]);
  out.counts[at[i]] = 1;
  out.steps[at[i]] = {step, step};
}

// Lines whose pending sums leave: those of n that are flagged.
struct Leaving {
  Gone* gone;
  int32_t *flags, *at;
  int64_t n;
  bool is_late;
  std::shared_ptr<void> memory, told;
  int64_t answer = 0;  // the event after which `told` is there

  const Told& of_host() const { return *static_cast<const Told*>(told.get()); }
};

// Sums on their way to the host's memory, or there.
struct Released {
  int64_t num;
  bool is_late;
  std::shared_ptr<void> block;  // as Out
  int64_t arrival;              // the event after which they are there
};

cudaStream_t on(Stream stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

std::shared_ptr<CacheStreams> one_stream(int device, Stream stream) {
  return std::make_shared<CacheStreams>(device, stream, stream);
}

struct CudaRowCache::Memory {
  int device;
  RowOptimizer optimizer;
  Policy policy;
  RowType type;
  Shape shape;
  uint32_t now = 0;  // iteration
  int32_t step = 0;
  bool has_drift = false;
  DeviceArray<Drift> drift;
  Ageing ageing;
  int64_t num_closed = 0;   // pending sums moved to the released sums
  int64_t num_evicted = 0;  // lines, as the host knows
  DeviceArray<uint8_t> tag;
  DeviceArray<int64_t> key;
  DeviceArray<uint64_t> worth;
  DeviceArray<Line> line;
  DeviceArray<Steps> steps;
  DeviceArray<uint32_t> late;
  DeviceArray<uint8_t> weight;
  DeviceArray<float> state, pending;
  DeviceArray<Counted> counted;
  DeviceArray<Counter> number;  // of a call; 0 between calls
  uint32_t num_due_calls = 0;
  bool are_late = false;        // whether the sums of the last call of due() have not left
  std::deque<Leaving> leaving;  // decided, and not moved yet
  std::vector<Released> released;
  ReleasedSums taken;  // earlier ones
  // Workspace of a call that decides, and of one that moves.
  DeviceArray<uint8_t> scratch, scratch_of_moves;
  DeviceArray<uint32_t> sets, sorted_sets;
  DeviceArray<int32_t> numbers, sorted_numbers, flags_of_moves, at_of_moves;

  Memory(int device, RowOptimizer optimizer, Policy policy, RowType type, Shape shape)
      : device(device), optimizer(optimizer), policy(policy), type(type), shape(shape) {}

  Lines lines() const {
    return {tag.data(),
            key.data(),
            worth.data(),
            line.data(),
            steps.data(),
            late.data(),
            weight.data(),
            state.data(),
            pending.data(),
            type,
            shape.num_sets,
            shape.ways,
            now,
            step,
            policy,
            optimizer,
            has_drift ? drift.data() : nullptr};
  }

  // Assigns consecutive indices `at` to the flagged of n > 0 entries, in order.
  static void number_flagged(const int32_t* flags, int64_t n, int32_t* at, DeviceArray<uint8_t>& scratch,
                             cudaStream_t stream) {
    with_scratch(scratch, stream, [&](void* memory, size_t& bytes) {
      return cub::DeviceScan::ExclusiveSum(memory, bytes, flags, at, static_cast<int>(n), stream);
    });
  }

  // Memory for n lines whose sums may leave.
  static Leaving leaving_of(int64_t n, bool is_late, CacheStreams& streams) {
    const int64_t bytes = n * static_cast<int64_t>(sizeof(Gone) + 2 * sizeof(int32_t));
    Leaving these{nullptr,
                  nullptr,
                  nullptr,
                  n,
                  is_late,
                  streams.gpu_memory->take(bytes),
                  streams.host_memory->take(sizeof(Told))};
    these.gone = static_cast<Gone*>(these.memory.get());
    these.flags = reinterpret_cast<int32_t*>(these.gone + n);
    these.at = these.flags + n;
    return these;
  }

  // Numbers those that are flagged, and tells the host. Their sums are moved by move_out().
  void decide(Leaving these, CacheStreams& streams) {
    const cudaStream_t deciding = streams.deciding();
    number_flagged(these.flags, these.n, these.at, scratch, deciding);
    launch(tell_kernel, 1, deciding, these.flags, these.at, these.n, counted.data(),
           static_cast<Told*>(these.told.get()));
    streams.decided.keep(these.memory);
    streams.decided.keep(these.told);
    these.answer = streams.decided.record(deciding);
    leaving.push_back(std::move(these));
  }

  // Moves the sums that leave, but for late ones at the end unless also_late. Waits for the decisions.
  void move_out(bool also_late, CacheStreams& streams) {
    const auto leaves = [=](const Leaving& these) { return also_late || !these.is_late; };
    while (std::any_of(leaving.begin(), leaving.end(), leaves)) {
      const Leaving& these = leaving.front();
      streams.decided.wait_for(these.answer);
      num_evicted = these.of_host().num_evicted;
      const int64_t num = these.of_host().num_flagged;
      if (num > 0) {
        streams.move_after_decisions();
        release(num, these.is_late, streams, [&](cudaStream_t moving, Out out) {
          streams.moved.keep(these.memory);
          launch(release_pending_kernel, these.n * kWarp, moving, lines(), these.gone, these.flags, these.at, these.n,
                 out);
        });
        num_closed += num;
      }
      leaving.pop_front();
    }
  }

  // write(stream, out) fills `num` released sums.
  template <typename Write>
  void release(int64_t num, bool is_late, CacheStreams& streams, Write write) {
    const int64_t bytes = Out::num_bytes(num, optimizer.sum_dim());
    const std::shared_ptr<void> block = streams.host_memory->take(bytes), on_gpu = streams.gpu_memory->take(bytes);
    const cudaStream_t moving = streams.moving();
    write(moving, Out(on_gpu.get(), num));
    HETMPI_CHECK(cudaMemcpyAsync(block.get(), on_gpu.get(), bytes, cudaMemcpyDeviceToHost, moving));
    streams.moved.keep(on_gpu);
    streams.moved.keep(block);
    released.push_back({num, is_late, block, streams.moved.record(moving)});
  }

  // Decides which of `slots`, or of the n slots from first_slot on, due_kernel selects.
  void decide_due(const int64_t* slots, int64_t first_slot, int64_t n, int64_t staleness, bool is_late,
                  CacheStreams& streams) {
    const Leaving due = leaving_of(n, is_late, streams);
    launch(due_kernel, n, streams.deciding(), lines(), slots, first_slot, n, staleness, due.gone, due.flags);
    decide(due, streams);  // first: it may fail
    launch(close_kernel, n, streams.deciding(), lines(), due.gone, due.flags, n, is_late ? ++num_due_calls : 0);
    are_late = is_late;
  }

  // Moves the released sums, or the late ones, to `sums`.
  void take(bool late, ReleasedSums& sums, CacheStreams& streams) {
    if (late) are_late = false;
    const auto append = [](auto& to, const auto* values, int64_t n) { to.insert(to.end(), values, values + n); };
    for (const Released& these : released) {
      if (these.is_late != late) continue;
      streams.moved.wait_for(these.arrival);
      const Out from(these.block.get(), these.num);
      append(sums.keys, from.keys, these.num);
      append(sums.clocks, from.clocks, these.num);
      append(sums.counts, from.counts, these.num);
      append(sums.steps, from.steps, these.num);
      append(sums.sums, from.sums, these.num * optimizer.sum_dim());
    }
    const auto is_taken = [=](const Released& these) { return these.is_late == late; };
    released.erase(std::remove_if(released.begin(), released.end(), is_taken), released.end());
  }
};

CudaRowCache::CudaRowCache(int64_t capacity_rows, RowOptimizer optimizer, Policy policy, RowType type, int device) {
  memory_ = std::make_unique<Memory>(device, optimizer, policy, type, Shape(capacity_rows));
  const OnDevice here(device);
  Memory& m = *memory_;
  const int64_t slots = num_slots();
  cudaStream_t stream = nullptr;
  m.tag.make_room(slots, 0, stream);
  m.key.make_room(slots, 0, stream);
  m.worth.make_room(slots, 0, stream);
  m.line.make_room(slots, 0, stream);
  m.steps.make_room(slots, 0, stream);
  m.late.make_room(slots, 0, stream);
  m.weight.make_room(slots * optimizer.dim() * bytes_of(type), 0, stream);
  m.state.make_room(slots * optimizer.preview_dim(), 0, stream);
  m.pending.make_room(slots * optimizer.sum_dim(), 0, stream);
  m.counted.make_room(1, 0, stream);
  m.number.make_room(1, 0, stream);
  m.tag.clear(slots, stream);
  m.worth.clear(slots, stream);
  m.line.clear(slots, stream);
  m.late.clear(slots, stream);
  m.counted.clear(1, stream);
  m.number.clear(1, stream);
  HETMPI_CHECK(cudaStreamSynchronize(stream));
}

CudaRowCache::~CudaRowCache() = default;

int CudaRowCache::device() const { return memory_->device; }

int64_t CudaRowCache::capacity_rows() const { return memory_->shape.capacity_rows(); }
int64_t CudaRowCache::num_slots() const { return memory_->shape.num_slots(); }
const RowOptimizer& CudaRowCache::optimizer() const { return memory_->optimizer; }
void CudaRowCache::set_drift(float most, float others) {
  const OnDevice here(device());
  cudaStream_t stream = nullptr;
  memory_->has_drift = most > 0;
  memory_->drift.make_room(1, 0, stream);
  const Drift drift{most, others};
  HETMPI_CHECK(cudaMemcpyAsync(memory_->drift.data(), &drift, sizeof(drift), cudaMemcpyHostToDevice, stream));
  HETMPI_CHECK(cudaStreamSynchronize(stream));
}

void CudaRowCache::set_step(double lr, int64_t step) {
  memory_->optimizer.set_step(lr, step);
  memory_->step = static_cast<int32_t>(step);
}

void CudaRowCache::look_up(const int64_t* keys, int64_t n, int64_t* slots, Stream stream) const {
  const OnDevice here(device());
  if (n == 0) return;
  if (num_slots() == 0) {
    HETMPI_CHECK(cudaMemsetAsync(slots, 0xff, n * sizeof(int64_t), on(stream)));
    return;
  }
  launch(look_up_kernel, n, on(stream), memory_->lines(), keys, n, slots, static_cast<Counter*>(nullptr));
}

void CudaRowCache::find(const int64_t* keys, int64_t n, int64_t* slots, int64_t* num, Stream stream) const {
  const OnDevice here(device());
  Counter* number = memory_->number.data();
  launch(look_up_kernel, n, on(stream), memory_->lines(), keys, n, slots, number);
  launch(move_kernel, 1, on(stream), number, num);
}

void CudaRowCache::use(const int64_t* slots, int64_t n, int64_t num_keys, Stream stream) {
  const OnDevice here(device());
  Memory& m = *memory_;
  ++m.now;
  if (m.ageing.is_due(m.policy, num_keys, capacity_rows()))
    launch(age_kernel, num_slots(), on(stream), m.lines(), num_slots());
  launch(use_kernel, n, on(stream), m.lines(), slots, n);
}

void CudaRowCache::read_clocks(const Partition& partition, const int32_t* const* shards, const int64_t* keys, int64_t n,
                               int32_t* clocks, Stream stream) const {
  const OnDevice here(device());
  launch(read_clocks_kernel, n, on(stream), partition, shards, keys, n, clocks);
}

void CudaRowCache::validate(const int64_t* slots, int32_t* owner_clocks, int64_t n, int64_t staleness,
                            uint8_t* is_stale, int64_t* num_stale, bool counts_lags, Stream stream) {
  const OnDevice here(device());
  Memory& m = *memory_;
  Counter* number = m.number.data();
  launch(validate_kernel, n, on(stream), m.lines(), slots, owner_clocks, n, staleness, m.are_late ? m.num_due_calls : 0,
         is_stale, number, counts_lags, m.counted.data());
  launch(move_kernel, 1, on(stream), number, num_stale);
}

void CudaRowCache::refresh(const int64_t* slots, const uint8_t* chosen, const float* weights, const float* states,
                           const int32_t* clocks, int64_t n, float anticipate, CacheStreams& streams) {
  const OnDevice here(device());
  Seen* const seen = streams.snapshot<Seen>(n);
  launch(renew_kernel, n, streams.deciding(), memory_->lines(), slots, chosen, clocks, n, seen);
  streams.move_after_decisions();
  launch(refresh_kernel, n * kWarp, streams.moving(), memory_->lines(), slots, chosen, seen, weights, states, n,
         anticipate);
  streams.moved.record(streams.moving());
}

void CudaRowCache::insert_and_evict(const int64_t* keys, const uint8_t* chosen, const float* weights,
                                    const float* states, const int32_t* clocks, int64_t n, int64_t* slots,
                                    CacheStreams& streams) {
  check_length(n);
  Memory& m = *memory_;
  if (num_slots() == 0 || n == 0) return;
  const OnDevice here(device());
  const cudaStream_t deciding = streams.deciding();
  const Leaving evicted = Memory::leaving_of(n, false, streams);
  uint8_t* const is_placed = streams.snapshot<uint8_t>(n);
  for (auto* array : {&m.sets, &m.sorted_sets}) array->make_room(n, 0, deciding);
  for (auto* array : {&m.numbers, &m.sorted_numbers}) array->make_room(n, 0, deciding);
  launch(wanted_sets_kernel, n, deciding, m.lines(), keys, chosen, slots, n, m.sets.data(), m.numbers.data(), is_placed,
         evicted.flags);
  with_scratch(m.scratch, deciding, [&](void* memory, size_t& bytes) {
    return cub::DeviceRadixSort::SortPairs(memory, bytes, m.sets.data(), m.sorted_sets.data(), m.numbers.data(),
                                           m.sorted_numbers.data(), static_cast<int>(n), 0, bits_of(m.shape.num_sets),
                                           deciding);
  });
  launch(place_kernel, n * kWarp, deciding, m.lines(), m.sorted_sets.data(), m.sorted_numbers.data(), n, keys, clocks,
         slots, is_placed, evicted.gone, evicted.flags, m.counted.data());
  m.decide(evicted, streams);
  streams.move_after_decisions();
  launch(fill_kernel, n * kWarp, streams.moving(), m.lines(), is_placed, slots, weights, states, n);
  streams.moved.record(streams.moving());
}

void CudaRowCache::forget(const int64_t* slots, int64_t n, Stream stream) {
  const OnDevice here(device());
  launch(forget_kernel, n, on(stream), memory_->lines(), slots, n, memory_->counted.data());
}

void CudaRowCache::gather(const int64_t* slots, int64_t n, const float* others, float* out, Stream stream) const {
  const OnDevice here(device());
  const Memory& m = *memory_;
  const int64_t dim = m.optimizer.dim(), quads = dim / 4;
  if (dim % 4 != 0 || !is_quad_aligned(out) || !is_quad_aligned(others))
    return launch(gather_kernel, n * kWarp, on(stream), m.lines(), others, slots, n, out);
  constexpr int kRows = 4;
  with_tile(quads, [&](auto tile) {
    if (m.type != RowType::kFloat32)
      return launch(gather_halves_kernel<tile()>, n * tile(), on(stream),
                    reinterpret_cast<const FourHalves*>(m.weight.data()), m.type,
                    reinterpret_cast<const float4*>(others), quads, slots, n, reinterpret_cast<float4*>(out));
    launch(gather_quads_kernel<tile(), kRows>, (n + kRows - 1) / kRows * tile(), on(stream),
           reinterpret_cast<const float4*>(m.weight.data()), reinterpret_cast<const float4*>(others), quads, slots, n,
           reinterpret_cast<float4*>(out));
  });
}

void CudaRowCache::update(const int64_t* slots, const float* grads, int64_t n, float anticipate,
                          CacheStreams& streams) {
  const OnDevice here(device());
  Memory& m = *memory_;
  m.move_out(true, streams);  // before the memory of their sums is used again
  Seen* const seen = streams.snapshot<Seen>(n);
  launch(tick_kernel, n, streams.deciding(), m.lines(), slots, n, seen, m.counted.data());
  streams.move_after_decisions();
  const cudaStream_t moving = streams.moving();
  const int64_t dim = m.optimizer.dim(), quads = dim / 4;
  if (m.has_drift) launch(begin_kernel, 1, moving, m.drift.data());
  if (m.type != RowType::kFloat32 || !m.optimizer.is_plain() || m.has_drift || dim % 4 != 0 ||
      !is_quad_aligned(grads)) {
    launch(update_kernel, n * kWarp, moving, m.lines(), slots, seen, grads, n, anticipate);
  } else {
    constexpr int kRows = 2;
    with_tile(quads, [&](auto tile) {
      launch(add_and_subtract_kernel<tile(), kRows>, (n + kRows - 1) / kRows * tile(), moving,
             reinterpret_cast<float4*>(m.weight.data()), reinterpret_cast<float4*>(m.pending.data()),
             m.optimizer.plain_step(anticipate), quads, slots, seen, reinterpret_cast<const float4*>(grads), n);
    });
  }
  if (m.has_drift)
    streams.decide_after_moves();  // gradients say which lines have drifted
  else
    streams.moved.record(moving);
}

void CudaRowCache::clocks_within(const int64_t* slots, int64_t n, bool will_write, int64_t staleness, int32_t* clocks,
                                 Stream stream) const {
  const OnDevice here(device());
  launch(clocks_within_kernel, n, on(stream), memory_->lines(), slots, n, will_write, staleness, clocks);
}

void CudaRowCache::look_at(const int64_t* slots, int64_t n, int32_t* clocks, int32_t* counts, Stream stream) const {
  const OnDevice here(device());
  launch(look_at_kernel, n, on(stream), memory_->lines(), slots, n, clocks, counts);
}

void CudaRowCache::release_directly(const int64_t* keys, const int64_t* slots, const int32_t* clocks,
                                    const float* grads, int64_t n, int64_t num, CacheStreams& streams) {
  check_length(n);
  if (num == 0) return;
  Memory& m = *memory_;
  const OnDevice here(device());
  const cudaStream_t moving = streams.moving();
  m.flags_of_moves.make_room(n, 0, moving);
  m.at_of_moves.make_room(n, 0, moving);
  const int32_t *flags = m.flags_of_moves.data(), *at = m.at_of_moves.data();
  streams.move_after_decisions();
  launch(without_line_kernel, n, moving, slots, n, m.flags_of_moves.data());
  Memory::number_flagged(flags, n, m.at_of_moves.data(), m.scratch_of_moves, moving);
  m.release(num, false, streams, [&](cudaStream_t, Out out) {
    launch(release_directly_kernel, n * kWarp, moving, m.optimizer, m.step, keys, clocks, grads, flags, at, n, out);
  });
}

void CudaRowCache::due(const int64_t* slots, int64_t n, int64_t staleness, bool is_late, CacheStreams& streams) {
  check_length(n);
  if (n == 0) return;
  const OnDevice here(device());
  memory_->decide_due(slots, 0, n, staleness, is_late, streams);
}

void CudaRowCache::move_out(CacheStreams& streams) {
  const OnDevice here(device());
  memory_->move_out(true, streams);
}

void CudaRowCache::due_all(CacheStreams& streams) {
  constexpr int64_t kSlots = 1 << 16;  // at a time: GPU memory may not hold all pending sums twice
  const OnDevice here(device());
  memory_->move_out(false, streams);
  for (int64_t begin = 0; begin < num_slots(); begin += kSlots) {
    memory_->decide_due(nullptr, begin, std::min(kSlots, num_slots() - begin), 0, false, streams);
    memory_->move_out(false, streams);
    memory_->take(false, memory_->taken, streams);
  }
}

int64_t CudaRowCache::num_released(bool late, CacheStreams& streams) {
  const OnDevice here(device());
  memory_->move_out(late, streams);
  int64_t num = late ? 0 : static_cast<int64_t>(memory_->taken.keys.size());
  for (const Released& these : memory_->released) num += these.is_late == late ? these.num : 0;
  return num;
}

ReleasedSums CudaRowCache::take(bool late, CacheStreams& streams) {
  const OnDevice here(device());
  ReleasedSums sums = late ? ReleasedSums() : std::exchange(memory_->taken, ReleasedSums());
  memory_->move_out(late, streams);
  memory_->take(late, sums, streams);
  return sums;
}

int64_t CudaRowCache::num_evicted() const { return memory_->num_evicted; }

CudaRowCache::Counts CudaRowCache::counts(Stream stream) const {
  const OnDevice here(device());
  const Counted counted = to_host(memory_->counted.data(), on(stream));
  const auto whole = [](Counter n) { return static_cast<int64_t>(n); };
  return {whole(counted.inserted), whole(counted.opened) - memory_->num_closed, whole(counted.stale),
          whole(counted.evicted)};
}

LagHistogram CudaRowCache::lags(Stream stream) const {
  const OnDevice here(device());
  const Counted counted = to_host(memory_->counted.data(), on(stream));
  LagHistogram lags;
  std::copy_n(counted.lags, LagHistogram::kBins, lags.bins);
  return lags;
}

void pin(void* memory, int64_t num_bytes, int device) {
  const OnDevice here(device);
  HETMPI_CHECK(cudaHostRegister(memory, num_bytes, cudaHostRegisterDefault));
}

void unpin(void* memory) { HETMPI_CHECK(cudaHostUnregister(memory)); }

std::string gpu_problem(int device) {
  int num = 0, major = 0, minor = 0;
  cudaError_t error = cudaGetDeviceCount(&num);
  if (error == cudaSuccess && num == 0) return "there is none";
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) {
    cudaGetLastError();
    return cudaGetErrorString(error);
  }
  if (major >= kLeastCapability) return "";
  return "its compute capability is " + std::to_string(major) + "." + std::to_string(minor) + ", at least " +
         std::to_string(kLeastCapability) + ".0 is needed";
}

}  // namespace hetmpi
