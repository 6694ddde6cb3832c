// Kernels of CudaRowCache. Decisions about one key, line or row are in cache/cache_decisions.h and
// owner/row_optimizer.h, shared with the CPU. Where the order of a batch matters, as within a set, one warp processes
// that set's keys in the order of the batch.
#include "cuda/cuda_cache.h"

#include <algorithm>
#include <cub/cub.cuh>
#include <utility>

#include "cuda/device.h"

namespace hetmpi {
namespace {

constexpr int kLeastCapability = 8;  // setup.py compiles for it and later ones
using Counter = unsigned long long;

struct Line {
  int32_t clock, age, count;
  float moved;  // of Drift
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
  Steps* steps;  // first and last step of the pending sum
  void* weight;  // of `type`
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
  __device__ HalfRow half_row(int64_t slot, int32_t clock) const {
    return HalfRow(halves_of(slot), type, row_seed(key[slot], clock));
  }
  __device__ float* state_of(int64_t slot) const { return state + slot * optimizer.preview_dim(); }
  __device__ float* pending_of(int64_t slot) const { return pending + slot * optimizer.sum_dim(); }
};

// Counters in GPU memory.
struct Counted {
  Counter inserted, evicted, opened, stale;
  Counter lags[LagHistogram::kBins];
};

// What the host reads after a wait.
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

__global__ void validate_kernel(Lines lines, const int64_t* slots, const int32_t* owner_clocks, int64_t n,
                                int64_t staleness, uint8_t* is_stale, bool counts_lags, Counted* counted) {
  const int64_t i = thread_number();
  bool stale = false;
  int bin = -1;
  if (i < n && slots[i] >= 0 && staleness != kUnbounded) {
    const Line line = lines.line[slots[i]];
    stale = !is_valid(owner_clocks[i], line.clock, line.age, staleness);
    if (!stale && counts_lags) bin = LagHistogram::bin_of(static_cast<int64_t>(owner_clocks[i]) - line.clock);
  }
  if (i < n) is_stale[i] = stale;
  count(&counted->stale, stale);
  for (unsigned left = __ballot_sync(kAll, bin >= 0); left != 0;) {
    const int leader = __ffs(static_cast<int>(left)) - 1, its = __shfl_sync(kAll, bin, leader);
    const unsigned same = __ballot_sync(kAll, bin == its);
    if (lane_number() == leader) atomicAdd(&counted->lags[its], static_cast<Counter>(__popc(same)));
    left &= ~same;
  }
}

// A warp per entry.
__global__ void refresh_kernel(Lines lines, const int64_t* slots, const uint8_t* chosen, const float* weights,
                               const float* states, const int32_t* clocks, int64_t n, float anticipate) {
  const int64_t i = warp_number();
  if (i >= n || slots[i] < 0 || !chosen[i]) return;
  const int64_t slot = slots[i], dim = lines.optimizer.dim(), preview_dim = lines.optimizer.preview_dim();
  const int lane = lane_number();
  set_row(lines, slot, weights + i * dim, lane);
  if (preview_dim > 0) copy(lines.state_of(slot), states + i * preview_dim, preview_dim, lane);
  const int32_t count = lines.line[slot].count;
  __syncwarp();
  if (lane == 0) {
    lines.line[slot].age = 0;
    lines.line[slot].moved = 0;
    lines.line[slot].clock = clocks[i] + count;
  }
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
    lines.optimizer.preview(lines.half_row(slot, clocks[i] + count), lines.state_of(slot), sum, Together{lane});
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

// The part of an update that concerns clocks. is_first (n): whether the line had no pending sum.
__global__ void tick_kernel(Lines lines, const int64_t* slots, int64_t n, uint8_t* is_first, Counted* counted) {
  const int64_t i = thread_number();
  bool opens = false;
  if (i < n && slots[i] >= 0) {
    Line line = lines.line[slots[i]];
    opens = line.count == 0;
    lines.line[slots[i]] = {line.clock + 1, next_age(line.age), line.count + 1, line.moved};
    lines.steps[slots[i]] = {opens ? lines.step : lines.steps[slots[i]].first, lines.step};
    is_first[i] = opens;
  }
  count(&counted->opened, opens);
}

__device__ float4 minus(float4 a, float step, float4 b) {
  return {a.x - step * b.x, a.y - step * b.y, a.z - step * b.z, a.w - step * b.w};
}

// pending += grads and weight -= step * grads, kTile lanes per row.
template <int kTile, int kRows>
__global__ void add_and_subtract_kernel(float4* weight, float4* pending, float step, int64_t quads,
                                        const int64_t* slots, const uint8_t* is_first, const float4* grads, int64_t n) {
  const int64_t begin = thread_number() / kTile * kRows;
  const int lane = threadIdx.x % kTile;
  int64_t slot[kRows];
  bool first[kRows];
  for (int k = 0; k < kRows; ++k) {
    slot[k] = begin + k < n ? slots[begin + k] : -1;
    first[k] = slot[k] >= 0 && is_first[begin + k];
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
__global__ void update_kernel(Lines lines, const int64_t* slots, const uint8_t* is_first, const float* grads, int64_t n,
                              float anticipate) {
  const int64_t i = warp_number();
  if (i >= n || slots[i] < 0) return;
  const Together loop{lane_number()};
  float* pending = lines.pending_of(slots[i]);
  if (is_first[i]) {  // squares too: released sums are checked for NaN
    loop.each(lines.optimizer.sum_dim(), [=](int64_t d) { pending[d] = 0; });
    __syncwarp();
  }
  const float* grad = grads + i * lines.optimizer.dim();
  float* state = lines.state_of(slots[i]);
  const Line now = lines.line[slots[i]];
  const int32_t own = updates_unseen(now.age, now.count);
  if (lines.type == RowType::kFloat32)
    lines.optimizer.add_and_preview(pending, now.count - 1, lines.floats_of(slots[i]), state, grad, anticipate, own,
                                    loop);
  else
    lines.optimizer.add_and_preview(pending, now.count - 1, lines.half_row(slots[i], now.clock), state, grad,
                                    anticipate, own, loop);
  if (lines.drift == nullptr) return;
  __syncwarp();
  const float step = lines.optimizer.step_square(state, grad, own, loop);
  const int64_t dim = lines.optimizer.dim();
  const auto sum_of_squares = [&](auto row) { return loop.sum(dim, [=](int64_t d) { return row[d] * row[d]; }); };
  const float square = lines.type == RowType::kFloat32 ? sum_of_squares(lines.floats_of(slots[i]))
                                                       : sum_of_squares(lines.half_row(slots[i], 0));
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

__global__ void close_kernel(Lines lines, const Gone* gone, const int32_t* flags, int64_t n) {
  const int64_t i = thread_number();
  if (i < n && flags[i]) lines.line[gone[i].slot].count = 0;
}

// Destination of released sums.
struct Out {
  int64_t* keys;
  int32_t *clocks, *counts;
  Steps* steps;
  float* sums;
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
__global__ void push_directly_kernel(RowOptimizer optimizer, int32_t step, const int64_t* keys, const int32_t* clocks,
                                     const float* grads, const int32_t* flags, const int32_t* at, int64_t n, Out out) {
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

cudaStream_t on(Stream stream) { return static_cast<cudaStream_t>(stream); }

}  // namespace

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
  DeviceArray<uint8_t> weight;
  DeviceArray<float> state, pending;
  DeviceArray<Counted> counted;
  DeviceArray<Counter> found;  // of find()
  PinnedArray<Told> told;
  // Released sums in GPU memory.
  DeviceArray<int64_t> out_keys;
  DeviceArray<int32_t> out_clocks, out_counts;
  DeviceArray<Steps> out_steps;
  DeviceArray<float> out_sums;
  int64_t num_out = 0;
  ReleasedSums handed_out;       // earlier ones, in host memory
  PinnedArray<uint8_t> fetched;  // on their way there
  // Workspace of a call.
  DeviceArray<uint8_t> is_chosen, scratch;
  DeviceArray<uint32_t> sets, sorted_sets;
  DeviceArray<int32_t> numbers, sorted_numbers, flags, at;
  DeviceArray<Gone> gone;

  Memory(int device, RowOptimizer optimizer, Policy policy, RowType type, Shape shape)
      : device(device), optimizer(optimizer), policy(policy), type(type), shape(shape) {}

  Lines lines() const {
    return {tag.data(),   key.data(),     worth.data(), line.data(),
            steps.data(), weight.data(),  state.data(), pending.data(),
            type,         shape.num_sets, shape.ways,   now,
            step,         policy,         optimizer,    has_drift ? drift.data() : nullptr};
  }

  // Assigns consecutive indices `at` to the flagged of n > 0 entries, in order.
  void number(int64_t n, cudaStream_t stream) {
    at.make_room(n, 0, stream);
    with_scratch(scratch, stream, [&](void* memory, size_t& bytes) {
      return cub::DeviceScan::ExclusiveSum(memory, bytes, flags.data(), at.data(), static_cast<int>(n), stream);
    });
  }

  // The same. Waits for their number, which it returns.
  int64_t count_flagged(int64_t n, cudaStream_t stream) {
    if (n == 0) return 0;
    number(n, stream);
    launch(tell_kernel, 1, stream, flags.data(), at.data(), n, counted.data(), told.data());
    HETMPI_CHECK(cudaStreamSynchronize(stream));
    return told.data()->num_flagged;
  }

  // Makes room for `num` more released sums. Called before any line changes, so that nothing is lost if memory is
  // short.
  void make_room_out(int64_t num, cudaStream_t stream) {
    const int64_t sum_dim = optimizer.sum_dim();
    out_keys.make_room(num_out + num, num_out, stream);
    out_clocks.make_room(num_out + num, num_out, stream);
    out_counts.make_room(num_out + num, num_out, stream);
    out_steps.make_room(num_out + num, num_out, stream);
    out_sums.make_room((num_out + num) * sum_dim, num_out * sum_dim, stream);
  }

  // Destination of the next push.
  Out out() const {
    return {out_keys.data() + num_out, out_clocks.data() + num_out, out_counts.data() + num_out,
            out_steps.data() + num_out, out_sums.data() + num_out * optimizer.sum_dim()};
  }

  // Writes the `num` pending sums in `gone` that are flagged and numbered to the released sums.
  void release_gone(int64_t n, int64_t num, cudaStream_t stream) {
    if (num > 0)
      launch(release_pending_kernel, n * kWarp, stream, lines(), gone.data(), flags.data(), at.data(), n, out());
    num_out += num;
    num_closed += num;
  }

  // Writes those of `slots` that due_kernel selects, or of the n slots from first_slot on, to the released sums.
  void release_due(const int64_t* slots, int64_t first_slot, int64_t n, int64_t staleness, cudaStream_t stream) {
    flags.make_room(n, 0, stream);
    gone.make_room(n, 0, stream);
    launch(due_kernel, n, stream, lines(), slots, first_slot, n, staleness, gone.data(), flags.data());
    const int64_t num = count_flagged(n, stream);
    if (num == 0) return;
    make_room_out(num, stream);
    launch(close_kernel, n, stream, lines(), gone.data(), flags.data(), n);
    release_gone(n, num, stream);
  }

  // Moves the released sums to host memory.
  void fetch_out(cudaStream_t stream) {
    if (num_out == 0) return;
    const auto each_column = [&](auto call) {
      call(handed_out.keys, out_keys, num_out);
      call(handed_out.clocks, out_clocks, num_out);
      call(handed_out.counts, out_counts, num_out);
      call(handed_out.steps, out_steps, num_out);
      call(handed_out.sums, out_sums, num_out * optimizer.sum_dim());
    };
    int64_t bytes = 0;
    each_column([&](auto& to, const auto&, int64_t n) { bytes += n * sizeof(to[0]); });
    fetched.make_room(bytes);
    uint8_t* place = fetched.data();
    each_column([&](auto& to, const auto& from, int64_t n) {
      HETMPI_CHECK(cudaMemcpyAsync(place, from.data(), n * sizeof(to[0]), cudaMemcpyDeviceToHost, stream));
      place += n * sizeof(to[0]);
    });
    HETMPI_CHECK(cudaStreamSynchronize(stream));
    place = fetched.data();
    each_column([&](auto& to, const auto&, int64_t n) {
      const auto* values = reinterpret_cast<decltype(to.data())>(place);
      to.insert(to.end(), values, values + n);
      place += n * sizeof(to[0]);
    });
    num_out = 0;
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
  m.weight.make_room(slots * optimizer.dim() * bytes_of(type), 0, stream);
  m.state.make_room(slots * optimizer.preview_dim(), 0, stream);
  m.pending.make_room(slots * optimizer.sum_dim(), 0, stream);
  m.counted.make_room(1, 0, stream);
  m.found.make_room(1, 0, stream);
  m.told.make_room(1);
  m.tag.clear(slots, stream);
  m.worth.clear(slots, stream);
  m.line.clear(slots, stream);
  m.counted.clear(1, stream);
  m.found.clear(1, stream);
  HETMPI_CHECK(cudaStreamSynchronize(stream));
}

CudaRowCache::~CudaRowCache() = default;

int CudaRowCache::device() const { return memory_->device; }

int64_t CudaRowCache::capacity_rows() const { return memory_->shape.capacity_rows(); }
int64_t CudaRowCache::num_slots() const { return memory_->shape.num_slots(); }
const RowOptimizer& CudaRowCache::optimizer() const { return memory_->optimizer; }
int64_t CudaRowCache::num_released() const {
  return memory_->num_out + static_cast<int64_t>(memory_->handed_out.keys.size());
}
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
  Counter* found = memory_->found.data();
  launch(look_up_kernel, n, on(stream), memory_->lines(), keys, n, slots, found);
  launch(move_kernel, 1, on(stream), found, num);
}

void CudaRowCache::use(const int64_t* slots, int64_t n, int64_t num_keys, Stream stream) {
  const OnDevice here(device());
  Memory& m = *memory_;
  ++m.now;
  if (m.ageing.is_due(m.policy, num_keys, capacity_rows()))
    launch(age_kernel, num_slots(), on(stream), m.lines(), num_slots());
  launch(use_kernel, n, on(stream), m.lines(), slots, n);
}

void CudaRowCache::validate(const int64_t* slots, const int32_t* owner_clocks, int64_t n, int64_t staleness,
                            uint8_t* is_stale, bool counts_lags, Stream stream) {
  const OnDevice here(device());
  launch(validate_kernel, n, on(stream), memory_->lines(), slots, owner_clocks, n, staleness, is_stale, counts_lags,
         memory_->counted.data());
}

void CudaRowCache::refresh(const int64_t* slots, const uint8_t* chosen, const float* weights, const float* states,
                           const int32_t* clocks, int64_t n, float anticipate, Stream stream) {
  const OnDevice here(device());
  launch(refresh_kernel, n * kWarp, on(stream), memory_->lines(), slots, chosen, weights, states, clocks, n,
         anticipate);
}

int64_t CudaRowCache::insert_and_evict(const int64_t* keys, const uint8_t* chosen, const float* weights,
                                       const float* states, const int32_t* clocks, int64_t n, int64_t num_missing,
                                       int64_t* slots, Stream stream) {
  check_length(n);
  Memory& m = *memory_;
  if (num_slots() == 0 || n == 0) return 0;
  const OnDevice here(device());
  const cudaStream_t s = on(stream);
  m.is_chosen.make_room(n, 0, s);
  m.gone.make_room(n, 0, s);
  for (auto* array : {&m.sets, &m.sorted_sets}) array->make_room(n, 0, s);
  for (auto* array : {&m.numbers, &m.sorted_numbers, &m.flags}) array->make_room(n, 0, s);
  m.make_room_out(num_missing, s);  // each may evict a line with a pending sum
  launch(wanted_sets_kernel, n, s, m.lines(), keys, chosen, slots, n, m.sets.data(), m.numbers.data(),
         m.is_chosen.data(), m.flags.data());
  with_scratch(m.scratch, s, [&](void* memory, size_t& bytes) {
    return cub::DeviceRadixSort::SortPairs(memory, bytes, m.sets.data(), m.sorted_sets.data(), m.numbers.data(),
                                           m.sorted_numbers.data(), static_cast<int>(n), 0, bits_of(m.shape.num_sets),
                                           s);
  });
  launch(place_kernel, n * kWarp, s, m.lines(), m.sorted_sets.data(), m.sorted_numbers.data(), n, keys, clocks, slots,
         m.is_chosen.data(), m.gone.data(), m.flags.data(), m.counted.data());
  launch(fill_kernel, n * kWarp, s, m.lines(), m.is_chosen.data(), slots, weights, states, n);
  m.release_gone(n, m.count_flagged(n, s), s);
  return m.told.data()->num_evicted - std::exchange(m.num_evicted, m.told.data()->num_evicted);
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

void CudaRowCache::update(const int64_t* slots, const float* grads, int64_t n, float anticipate, Stream stream) {
  const OnDevice here(device());
  Memory& m = *memory_;
  const cudaStream_t s = on(stream);
  m.is_chosen.make_room(n, 0, s);
  launch(tick_kernel, n, s, m.lines(), slots, n, m.is_chosen.data(), m.counted.data());
  const int64_t dim = m.optimizer.dim(), quads = dim / 4;
  if (m.has_drift) launch(begin_kernel, 1, s, m.drift.data());
  if (m.type != RowType::kFloat32 || !m.optimizer.is_plain() || m.has_drift || dim % 4 != 0 || !is_quad_aligned(grads))
    return launch(update_kernel, n * kWarp, s, m.lines(), slots, m.is_chosen.data(), grads, n, anticipate);
  constexpr int kRows = 2;
  with_tile(quads, [&](auto tile) {
    launch(add_and_subtract_kernel<tile(), kRows>, (n + kRows - 1) / kRows * tile(), s,
           reinterpret_cast<float4*>(m.weight.data()), reinterpret_cast<float4*>(m.pending.data()),
           m.optimizer.plain_step(anticipate), quads, slots, m.is_chosen.data(), reinterpret_cast<const float4*>(grads),
           n);
  });
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

void CudaRowCache::push_directly(const int64_t* keys, const int64_t* slots, const int32_t* clocks, const float* grads,
                                 int64_t n, int64_t num, Stream stream) {
  check_length(n);
  if (num == 0) return;
  Memory& m = *memory_;
  const OnDevice here(device());
  const cudaStream_t s = on(stream);
  m.flags.make_room(n, 0, s);
  launch(without_line_kernel, n, s, slots, n, m.flags.data());
  m.number(n, s);
  m.make_room_out(num, s);
  launch(push_directly_kernel, n * kWarp, s, m.optimizer, m.step, keys, clocks, grads, m.flags.data(), m.at.data(), n,
         m.out());
  m.num_out += num;
}

void CudaRowCache::take_pending(const int64_t* slots, int64_t n, int64_t staleness, Stream stream) {
  check_length(n);
  if (n == 0) return;
  const OnDevice here(device());
  memory_->release_due(slots, 0, n, staleness, on(stream));
}

void CudaRowCache::take_all(Stream stream) {
  constexpr int64_t kSlots = 1 << 16;  // at a time: GPU memory may not hold all pending sums twice
  const OnDevice here(device());
  for (int64_t begin = 0; begin < num_slots(); begin += kSlots) {
    memory_->release_due(nullptr, begin, std::min(kSlots, num_slots() - begin), 0, on(stream));
    memory_->fetch_out(on(stream));
  }
}

ReleasedSums CudaRowCache::take(Stream stream) {
  const OnDevice here(device());
  memory_->fetch_out(on(stream));
  return std::exchange(memory_->handed_out, ReleasedSums());
}

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
