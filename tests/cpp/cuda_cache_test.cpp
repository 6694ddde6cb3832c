// CudaRowCache compared with RowCache over random streams of calls: slots, rows, clocks, pushed sums, counts and lags,
// bit for bit. CudaUnique compared with a search, and sums by row with the CPU's. Built with nvcc it runs on the GPU,
// with tests/cpp/cuda_on_cpu first in the include path on the CPU. Exit code 0 if all holds, otherwise 1 with the
// failure on stderr.
//
//   cuda_cache_test [SEED [STREAMS]]   default 1 60
#include "cuda/cuda_cache.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cache/row_cache.h"
#include "cuda/cuda_unique.h"
#include "cuda/row_sums.h"

namespace hetmpi {
namespace {

using Floats = std::vector<float>;
using Ints = std::vector<int64_t>;
using Clocks = std::vector<int32_t>;
using Bytes = std::vector<uint8_t>;
using Random = std::mt19937_64;

std::string current_case;

void check(bool holds, const char* claim, int line) {
  if (holds) return;
  std::fprintf(stderr, "%s:%d: not so: %s\n  in %s\n", __FILE__, line, claim, current_case.c_str());
  std::exit(1);
}
#define CHECK(claim) check((claim), #claim, __LINE__)

void must(cudaError_t error) { check(error == cudaSuccess, cudaGetErrorString(error), 0); }

// A host array in GPU memory.
template <typename T>
class OnGpu {
 public:
  explicit OnGpu(const std::vector<T>& values) : size_(values.size()) {
    if (size_ == 0) return;
    must(cudaMalloc(reinterpret_cast<void**>(&data_), size_ * sizeof(T)));
    must(cudaMemcpyAsync(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice, nullptr));
    must(cudaStreamSynchronize(nullptr));
  }
  OnGpu(const OnGpu&) = delete;
  ~OnGpu() { cudaFree(data_); }

  T* get() const { return data_; }

  std::vector<T> back() const {
    std::vector<T> values(size_);
    if (size_ > 0) must(cudaMemcpyAsync(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost, nullptr));
    must(cudaStreamSynchronize(nullptr));
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
};

template <typename Vector>
bool same_bits(const Vector& a, const Vector& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0);
}

int64_t pick(Random& random, int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }

template <typename T>
T one_of(Random& random, const std::vector<T>& values) {
  return values[pick(random, values.size())];
}

Floats normals(Random& random, int64_t n, float std = 1) {
  std::normal_distribution<float> normal(0, std);
  Floats values(n);
  for (float& value : values) value = normal(random);
  return values;
}

Floats positives(Random& random, int64_t n) {
  Floats values = normals(random, n);
  for (float& value : values) value = value * value;
  return values;
}

Bytes coins(Random& random, int64_t n, int64_t heads_in_ten) {
  Bytes values(n);
  for (uint8_t& value : values) value = pick(random, 10) < heads_in_ten;
  return values;
}

// Both caches, driven by the same calls.
class Both {
 public:
  // capacity, num_keys: -1 for some.
  explicit Both(Random& random, int64_t capacity = -1, int64_t num_keys = -1)
      : random_(random),
        rule_(one_of<std::string>(random, {"sgd", "adagrad", "rowwise_adagrad", "adam", "momentum", "ftrl"})),
        dim_(one_of<int64_t>(random, {1, 3, 4, 8, 20, 32, 64, 128, 130, 132})),
        capacity_(capacity >= 0 ? capacity : one_of<int64_t>(random, {0, 1, 5, 31, 32, 64, 96, 200})),
        policy_(one_of<Policy>(random, {Policy::kLru, Policy::kLfu, Policy::kLfuOpt})),
        optimizer_(rule_, dim_, one_of<float>(random, {0, 0.01f}), 0.9f, 0.999f, 1e-8f),
        staleness_(one_of<int64_t>(random, {0, 1, 3, 10, kUnbounded})),
        anticipate_(one_of<float>(random, {1, 4})),
        num_keys_(num_keys >= 0 ? num_keys : std::max<int64_t>(8, capacity_ * one_of<int64_t>(random, {1, 2, 3}))),
        type_(one_of<RowType>(random, {RowType::kFloat32, RowType::kFloat16, RowType::kBfloat16})),
        on_cpu_(capacity_, optimizer_, policy_, type_),
        on_gpu_(capacity_, optimizer_, policy_, type_) {
    current_case += ", rule " + rule_ + ", dim " + std::to_string(dim_) + ", capacity " + std::to_string(capacity_) +
                    ", policy " + std::to_string(static_cast<int>(policy_)) + ", staleness " +
                    std::to_string(staleness_) + ", rows " + std::to_string(static_cast<int>(type_));
    const float drift = one_of<float>(random, {0, 0.1f, 1, 4});
    current_case += ", drift " + std::to_string(drift);
    on_cpu_.set_drift(drift, 3);
    on_gpu_.set_drift(drift, 3);
    CHECK(on_cpu_.capacity_rows() == on_gpu_.capacity_rows() && on_cpu_.num_slots() == on_gpu_.num_slots());
  }

  void step(int64_t number) {
    on_cpu_.set_step(0.1, number + 1);
    on_gpu_.set_step(0.1, number + 1);
    look_up();
    classify();
    renew();
    insert();
    gather();
    update();
    hand_out();
    if (pick(random_, 5) == 0) take();
    if (pick(random_, 8) == 0) forget();
  }

  void finish() {
    on_cpu_.release_all(&pushes_);
    on_gpu_.due_all(*streams_);
    take();
    const CudaRowCache::Counts counts = on_gpu_.counts(nullptr);
    CHECK(counts.rows == on_cpu_.num_rows() && counts.pending == 0 && on_cpu_.num_pending() == 0);
    CHECK(counts.stale == num_stale_ && counts.evicted == num_evicted_);
    const LagHistogram lags = on_gpu_.lags(nullptr);
    CHECK(std::memcmp(lags.bins, lags_.bins, sizeof(lags.bins)) == 0);
  }

 private:
  int64_t n() const { return static_cast<int64_t>(keys_.size()); }
  int64_t preview_dim() const { return optimizer_.preview_dim(); }
  int64_t sum_dim() const { return optimizer_.sum_dim(); }

  void look_up() {
    keys_.resize(num_keys_);
    std::iota(keys_.begin(), keys_.end(), pick(random_, 3) * 1'000'003);
    for (int64_t i = num_keys_; i > 1; --i) std::swap(keys_[i - 1], keys_[pick(random_, i)]);
    keys_.resize(pick(random_, num_keys_ + 1));
    slots_.assign(n(), 7);
    const OnGpu keys(keys_), slots(slots_);
    on_cpu_.look_up(keys_.data(), n(), slots_.data());
    on_gpu_.look_up(keys.get(), n(), slots.get(), nullptr);
    CHECK(same_bits(slots_, slots.back()));
    if (on_gpu_.num_slots() > 0) {
      const OnGpu found(std::vector<int64_t>{-1});
      on_gpu_.find(keys.get(), n(), slots.get(), found.get(), nullptr);
      CHECK(same_bits(slots_, slots.back()));
      CHECK(found.back().at(0) == std::count_if(slots_.begin(), slots_.end(), [](int64_t slot) { return slot >= 0; }));
    }
    on_cpu_.use(slots_.data(), n(), n());
    on_gpu_.use(slots.get(), n(), n(), nullptr);
  }

  void classify() {
    clocks_.resize(n());
    for (int32_t& clock : clocks_) clock = static_cast<int32_t>(pick(random_, 40));
    is_stale_.assign(n(), 9);
    const OnGpu slots(slots_);
    const OnGpu clocks(clocks_);
    const OnGpu is_stale(is_stale_);
    const bool counts_lags = pick(random_, 2) == 0;
    num_stale_ += on_cpu_.validate(slots_.data(), clocks_.data(), n(), staleness_, is_stale_.data(),
                                   counts_lags ? &lags_ : nullptr);
    const OnGpu num_stale(std::vector<int64_t>{-1});
    on_gpu_.validate(slots.get(), clocks.get(), n(), staleness_, is_stale.get(), num_stale.get(), counts_lags, nullptr);
    CHECK(same_bits(is_stale_, is_stale.back()) && same_bits(clocks_, clocks.back()));
    if (n() > 0) CHECK(num_stale.back().at(0) == std::count(is_stale_.begin(), is_stale_.end(), 1));
    Clocks told(n(), 5);
    const OnGpu told_on_gpu(told);
    const bool will_write = pick(random_, 2) == 0;
    on_cpu_.clocks_within(slots_.data(), n(), will_write, staleness_, told.data());
    on_gpu_.clocks_within(slots.get(), n(), will_write, staleness_, told_on_gpu.get(), nullptr);
    CHECK(same_bits(told, told_on_gpu.back()));
    Clocks counts(n(), -1);
    told.assign(n(), -1);
    for (int64_t i = 0; i < n(); ++i) {
      if (slots_[i] < 0) continue;
      told[i] = on_cpu_.clock(slots_[i]);
      counts[i] = on_cpu_.count(slots_[i]);
    }
    const OnGpu counts_on_gpu(Clocks(n(), 5));
    on_gpu_.look_at(slots.get(), n(), told_on_gpu.get(), counts_on_gpu.get(), nullptr);
    CHECK(same_bits(told, told_on_gpu.back()) && same_bits(counts, counts_on_gpu.back()));
  }

  void renew() {
    const Floats weights = normals(random_, n() * dim_), states = positives(random_, n() * preview_dim());
    const OnGpu slots(slots_);
    const OnGpu chosen(is_stale_);
    const OnGpu weight(weights), state(states);
    const OnGpu clocks(clocks_);
    on_cpu_.refresh(slots_.data(), is_stale_.data(), weights.data(), states.data(), clocks_.data(), n(), anticipate_);
    on_gpu_.refresh(slots.get(), chosen.get(), weight.get(), state.get(), clocks.get(), n(), anticipate_, *streams_);
  }

  void insert() {
    const Floats weights = normals(random_, n() * dim_), states = positives(random_, n() * preview_dim());
    const Bytes wanted = coins(random_, n(), 8);
    const OnGpu keys(keys_), slots(slots_);
    const OnGpu chosen(wanted);
    const OnGpu weight(weights), state(states);
    const OnGpu clocks(clocks_);
    num_evicted_ += on_cpu_.insert_and_evict(keys_.data(), wanted.data(), weights.data(), states.data(), clocks_.data(),
                                             n(), slots_.data(), &pushes_);
    on_gpu_.insert_and_evict(keys.get(), chosen.get(), weight.get(), state.get(), clocks.get(), n(), slots.get(),
                             *streams_);
    CHECK(same_bits(slots_, slots.back()));
    if (pick(random_, 2) == 0) {  // else the next update moves the sums
      CHECK(on_gpu_.num_released(false, *streams_) == static_cast<int64_t>(pushes_.keys.size()));
      CHECK(on_gpu_.num_evicted() == num_evicted_);
    }
  }

  void gather() {
    Floats rows(n() * dim_, 3);
    const OnGpu slots(slots_);
    const OnGpu out(rows);
    on_cpu_.gather(slots_.data(), n(), rows.data());
    on_gpu_.gather(slots.get(), n(), nullptr, out.get(), nullptr);
    CHECK(same_bits(rows, out.back()));
    Floats others = normals(random_, n() * dim_);
    const OnGpu other(others);
    on_cpu_.gather(slots_.data(), n(), others.data());
    on_gpu_.gather(slots.get(), n(), other.get(), out.get(), nullptr);
    CHECK(same_bits(others, out.back()));
  }

  void update() {
    Ints updated = slots_;
    for (int64_t& slot : updated)
      if (pick(random_, 10) == 0) slot = -1;
    const Floats values = normals(random_, n() * dim_);
    const OnGpu slots(updated);
    const OnGpu grads(values);
    on_cpu_.update(updated.data(), values.data(), n(), anticipate_);
    on_gpu_.update(slots.get(), grads.get(), n(), anticipate_, *streams_);
    gather();
  }

  void hand_out() {
    const Floats values = normals(random_, n() * dim_);
    for (int32_t& clock : clocks_)
      if (pick(random_, 4) == 0) clock = kUnknownClock;
    const OnGpu keys(keys_), slots(slots_);
    const OnGpu clocks(clocks_);
    const OnGpu grads(values);
    on_cpu_.release_directly(keys_.data(), slots_.data(), clocks_.data(), values.data(), n(), &pushes_);
    on_gpu_.release_directly(keys.get(), slots.get(), clocks.get(), grads.get(), n(),
                             std::count(slots_.begin(), slots_.end(), -1), *streams_);
    const bool is_late = pick(random_, 2) == 0;
    on_gpu_.due(slots.get(), n(), staleness_, is_late, *streams_);
    if (is_late) take();  // all others
    on_cpu_.release_due(slots_.data(), n(), staleness_, &pushes_);
    if (is_late) take(true);
    on_gpu_.move_out(*streams_);
    const CudaRowCache::Counts counts = on_gpu_.counts(nullptr);
    CHECK(counts.rows == on_cpu_.num_rows() && counts.pending == on_cpu_.num_pending());
  }

  void forget() {
    on_cpu_.release_all(&pushes_);
    on_gpu_.due_all(*streams_);
    look_up();
    const OnGpu slots(slots_);
    on_cpu_.forget(keys_.data(), n());
    on_gpu_.forget(slots.get(), n(), nullptr);
    CHECK(on_gpu_.counts(nullptr).rows == on_cpu_.num_rows());
    on_gpu_.look_up(OnGpu(keys_).get(), n(), slots.get(), nullptr);
    CHECK(same_bits(slots.back(), Ints(n(), -1)));
  }

  void take(bool late = false) {
    CHECK(on_gpu_.num_released(late, *streams_) == static_cast<int64_t>(pushes_.keys.size()));
    ReleasedSums found = on_gpu_.take(late, *streams_);
    CHECK(same_bits(found.keys, pushes_.keys) && same_bits(found.clocks, pushes_.clocks));
    CHECK(same_bits(found.counts, pushes_.counts) && same_bits(found.steps, pushes_.steps));
    for (ReleasedSums* pushes : {&found, &pushes_}) clear_undefined(pushes);
    CHECK(same_bits(found.sums, pushes_.sums));
    pushes_ = ReleasedSums();
  }

  // The squares of single gradients.
  void clear_undefined(ReleasedSums* pushes) const {
    for (size_t i = 0; i < pushes->counts.size(); ++i)
      if (pushes->counts[i] == 1) std::fill_n(pushes->sums.data() + i * sum_dim() + dim_, sum_dim() - dim_, 0.0f);
  }

  Random& random_;
  std::string rule_;
  int64_t dim_, capacity_;
  Policy policy_;
  RowOptimizer optimizer_;
  int64_t staleness_;
  float anticipate_;
  int64_t num_keys_;
  RowType type_;
  RowCache on_cpu_;
  CudaRowCache on_gpu_;
  std::shared_ptr<CacheStreams> streams_ = one_stream(0, nullptr);
  Ints keys_, slots_;
  Clocks clocks_;
  Bytes is_stale_;
  ReleasedSums pushes_;
  LagHistogram lags_;
  int64_t num_stale_ = 0, num_evicted_ = 0;
};

// Sums by row of random values, in parts, with the bits of the CPU. of_order: of the index.
void check_sums(Random& random, const Ints& index, int64_t num_rows, const OnGpu<int32_t>& of_order) {
  const int64_t n = index.size(), dim = one_of<int64_t>(random, {1, 4, 5, 12, 64, 132});
  const int64_t of_part = n % 8 == 0 ? one_of<int64_t>(random, {1, 8}) : std::max<int64_t>(n, 1);
  const int64_t num_parts = n / of_part, stride = of_part * dim + pick(random, 6);
  Floats values(num_parts * stride, std::nanf(""));
  for (int64_t i = 0; i < n; ++i)
    for (int64_t d = 0; d < dim; ++d)
      values[i / of_part * stride + i % of_part * dim + d] =
          static_cast<float>(pick(random, 1 << 20)) / 3 - static_cast<float>(1 << 18);
  Floats expected(num_rows * dim, 7);
  sum_by_row(values.data(), num_parts, of_part, stride, index.data(), num_rows, dim, expected.data());
  const OnGpu value(values), later(Floats(RowOrder::num_windows(n) * dim, 7)), sums(Floats(num_rows * dim, 7));
  sum_by_row_on_gpu(value.get(), num_parts, of_part, stride, RowOrder(of_order.get(), n), num_rows, dim, later.get(),
                    sums.get(), 0, nullptr);
  CHECK(same_bits(sums.back(), expected));
}

void check_order(Random& random) {
  for (const int64_t n : {0, 1, 64, 65, 128, 129, 4'000}) {
    const int64_t num_rows = one_of<int64_t>(random, {1, 2, 3, 60, 5'000});
    Ints index(n);
    for (int64_t& row : index) row = pick(random, 1 + pick(random, num_rows));  // the first rows are frequent
    const OnGpu rows(index);
    const OnGpu order(Clocks(RowOrder::size(n, num_rows), 7));
    const OnGpu scratch(Bytes(scratch_bytes(n, num_rows, 0)));
    order_rows(rows.get(), n, num_rows, RowOrder(order.get(), n), scratch.get(), 0, nullptr);
    check_sums(random, index, num_rows, order);
  }
}

void check_unique(Random& random) {
  CudaUnique on_gpu;
  for (const int64_t n : {0, 1, 31, 5'000, 3, 800}) {
    const int64_t limit = one_of<int64_t>(random, {1, 2, 40, 1000, int64_t{1} << 40});
    Ints ids(n), keys, index(n);
    for (int64_t i = 0; i < n; ++i) {
      ids[i] = pick(random, limit);
      index[i] = std::find(keys.begin(), keys.end(), ids[i]) - keys.begin();
      if (index[i] == static_cast<int64_t>(keys.size())) keys.push_back(ids[i]);
    }
    const OnGpu id(ids), key(Ints(n, 7)), at(Ints(n, 7));
    const OnGpu order(Clocks(RowOrder::size(n, n), 7));
    CHECK(on_gpu.unique(id.get(), n, limit, key.get(), at.get(), order.get(), nullptr) ==
          static_cast<int64_t>(keys.size()));
    check_sums(random, index, keys.size(), order);
    keys.resize(n, 7);
    CHECK(same_bits(key.back(), keys) && same_bits(at.back(), index));
  }
}

void run_all(uint64_t seed, int streams) {
  for (int stream = 0; stream < streams; ++stream) {
    current_case = "seed " + std::to_string(seed) + ", stream " + std::to_string(stream);
    Random random(seed * 1000 + stream);
    Both both(random);
    for (int64_t number = 0; number < 30; ++number) both.step(number);
    both.finish();
  }
  current_case = "seed " + std::to_string(seed) + ", unique keys";
  Random more(seed);
  check_unique(more);
  check_order(more);
  current_case = "seed " + std::to_string(seed) + ", more slots than are handed out at a time";
  Random random(seed);
  Both both(random, 70'000, 300);
  for (int64_t number = 0; number < 3; ++number) both.step(number);
  both.finish();
}

}  // namespace
}  // namespace hetmpi

int main(int argc, char** argv) {
  const std::string problem = hetmpi::gpu_problem();
  if (!problem.empty()) {
    std::fprintf(stderr, "no GPU can be used: %s\n", problem.c_str());
    return 77;
  }
  hetmpi::run_all(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1, argc > 2 ? std::atoi(argv[2]) : 60);
  return 0;
}
