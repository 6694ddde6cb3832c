// Distances of all pairs of two sets of rows, for scores of links, and their gradients:
//
//   Absolute   the sum of absolute differences
//   Euclidean  the root of the sum of squared differences
//   Moduli     the sum of moduli of complex differences; a row has all real parts, then all imaginary ones
//
// The bits depend neither on the processor nor on the number of threads: a sum is made of kLanes partial sums, and
// gradients are divided among threads by places in a row, which do not meet.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "vectors.h"

namespace hetmpi {

constexpr int kLanes = 16;          // partial sums
constexpr int64_t kBlockRows = 16;  // of the second set, which stay in a core's first cache while the first set passes
constexpr float kLeast = 1e-38f;    // a smaller distance or squared modulus is zero and has no direction

struct Absolute {
  static int64_t num_places(int64_t dim) { return dim; }
  static float part(const float* a, const float* b, int64_t, int64_t i) { return std::fabs(a[i] - b[i]); }
  static float whole(float sum) { return sum; }
  static float factor(float grad, float) { return grad; }
  static void add_gradients(const float* __restrict a, const float* __restrict b, int64_t, float factor, int64_t first,
                            int64_t last, float* __restrict of_a, float* __restrict of_b) {
    for (int64_t i = first; i < last; ++i) {
      const float difference = a[i] - b[i];
      const float moved = difference > 0 ? factor : difference < 0 ? -factor : difference;  // 0 or NaN
      of_a[i] += moved;
      of_b[i] -= moved;
    }
  }
};

struct Euclidean {
  static int64_t num_places(int64_t dim) { return dim; }
  static float part(const float* a, const float* b, int64_t, int64_t i) { return (a[i] - b[i]) * (a[i] - b[i]); }
  static float whole(float sum) { return std::sqrt(sum); }
  static float factor(float grad, float distance) { return distance <= kLeast ? 0 : grad / distance; }
  static void add_gradients(const float* __restrict a, const float* __restrict b, int64_t, float factor, int64_t first,
                            int64_t last, float* __restrict of_a, float* __restrict of_b) {
    for (int64_t i = first; i < last; ++i) {
      const float moved = factor * (a[i] - b[i]);
      of_a[i] += moved;
      of_b[i] -= moved;
    }
  }
};

struct Moduli {
  static int64_t num_places(int64_t dim) { return dim / 2; }
  static float part(const float* a, const float* b, int64_t dim, int64_t i) {
    const float real = a[i] - b[i], imaginary = a[dim / 2 + i] - b[dim / 2 + i];
    return std::sqrt(real * real + imaginary * imaginary);
  }
  static float whole(float sum) { return sum; }
  static float factor(float grad, float) { return grad; }
  static void add_gradients(const float* a, const float* b, int64_t dim, float factor, int64_t first, int64_t last,
                            float* of_a, float* of_b) {
    const int64_t half = dim / 2;
    add_to_parts(a, a + half, b, b + half, factor, first, last, of_a, of_a + half, of_b, of_b + half);
  }

 private:
  static void add_to_parts(const float* __restrict a_real, const float* __restrict a_imaginary,
                           const float* __restrict b_real, const float* __restrict b_imaginary, float factor,
                           int64_t first, int64_t last, float* __restrict of_a_real, float* __restrict of_a_imaginary,
                           float* __restrict of_b_real, float* __restrict of_b_imaginary) {
    for (int64_t i = first; i < last; ++i) {
      const float real = a_real[i] - b_real[i], imaginary = a_imaginary[i] - b_imaginary[i];
      const float square = real * real + imaginary * imaginary;
      const float share = factor / std::sqrt(square > kLeast ? square : kLeast);
      of_a_real[i] += share * real;
      of_a_imaginary[i] += share * imaginary;
      of_b_real[i] -= share * real;
      of_b_imaginary[i] -= share * imaginary;
    }
  }
};

template <typename Kind>
inline float distance(const float* __restrict a, const float* __restrict b, int64_t dim) {
  const int64_t num = Kind::num_places(dim);
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= num; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += Kind::part(a, b, dim, i + lane);
  for (int lane = 0; i < num; ++i, ++lane) lanes[lane] += Kind::part(a, b, dim, i);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return Kind::whole(lanes[0]);
}

// Calls work(i, j) for all pairs of n rows with num others, in blocks of others.
template <typename Work>
inline void for_pairs(int64_t n, int64_t num, const Work& work) {
  for (int64_t begin = 0; begin < num; begin += kBlockRows) {
    const int64_t end = begin + kBlockRows < num ? begin + kBlockRows : num;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = begin; j < end; ++j) work(i, j);
  }
}

// Two sets of rows: n and num of them.
struct RowPairs {
  const float *rows, *others;
  int64_t n, num, dim;
};

template <typename Kind>
inline void distances_of(const RowPairs& pairs, float* out) {
  for_pairs(pairs.n, pairs.num, [&](int64_t i, int64_t j) {
    out[i * pairs.num + j] = distance<Kind>(pairs.rows + i * pairs.dim, pairs.others + j * pairs.dim, pairs.dim);
  });
}

// Adds the gradients of places [first, last), given those of the distances (n, num).
template <typename Kind>
inline void add_gradients_of(const RowPairs& pairs, const float* distances, const float* grads, int64_t first,
                             int64_t last, float* of_rows, float* of_others) {
  for_pairs(pairs.n, pairs.num, [&](int64_t i, int64_t j) {
    const float grad = grads[i * pairs.num + j];
    if (grad == 0) return;
    const int64_t row = i * pairs.dim, other = j * pairs.dim;
    Kind::add_gradients(pairs.rows + row, pairs.others + other, pairs.dim,
                        Kind::factor(grad, distances[i * pairs.num + j]), first, last, of_rows + row,
                        of_others + other);
  });
}

enum class Distance { kAbsolute, kEuclidean, kModuli };

// distances (n, num)
HETMPI_CLONES static inline void all_distances(Distance kind, const RowPairs& pairs, float* out) {
  if (kind == Distance::kAbsolute) distances_of<Absolute>(pairs, out);
  if (kind == Distance::kEuclidean) distances_of<Euclidean>(pairs, out);
  if (kind == Distance::kModuli) distances_of<Moduli>(pairs, out);
}

HETMPI_CLONES static inline void add_all_gradients(Distance kind, const RowPairs& pairs, const float* distances,
                                                   const float* grads, int64_t first, int64_t last, float* of_rows,
                                                   float* of_others) {
  if (kind == Distance::kAbsolute) add_gradients_of<Absolute>(pairs, distances, grads, first, last, of_rows, of_others);
  if (kind == Distance::kEuclidean)
    add_gradients_of<Euclidean>(pairs, distances, grads, first, last, of_rows, of_others);
  if (kind == Distance::kModuli) add_gradients_of<Moduli>(pairs, distances, grads, first, last, of_rows, of_others);
}

// Calls work(begin, end) for parts of [0, n), in as many threads.
inline void in_threads(int64_t n, int64_t num_threads, const std::function<void(int64_t, int64_t)>& work) {
  std::vector<std::thread> threads;
  num_threads = num_threads > 1 ? num_threads : 1;
  for (int64_t t = 1; t < num_threads; ++t) threads.emplace_back(work, n * t / num_threads, n * (t + 1) / num_threads);
  work(0, n / num_threads);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace hetmpi
