// hetmpi._C: the only file that knows Python. Checks dtypes and shapes, releases the GIL, calls the core.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sched.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <thread>

#include "engine.h"
#include "inbox.h"
#include "key_index.h"
#include "partition.h"
#include "ring.h"
#include "row_cache.h"
#include "row_init.h"
#include "row_optimizer.h"
#include "shard.h"

namespace py = pybind11;
using py::ssize_t;

namespace hetmpi {

void bind_cuda(py::module_& m);  // cuda_bindings.cpp

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

std::string shape_of(const py::array& array) {
  std::string text = "(";
  for (ssize_t i = 0; i < array.ndim(); ++i) text += (i ? ", " : "") + std::to_string(array.shape(i));
  return text + (array.ndim() == 1 ? ",)" : ")");
}

// Raises ValueError unless `array` has the given shape; -1 admits any length.
void check_shape(const py::array& array, const char* name, std::initializer_list<ssize_t> shape) {
  bool matches = array.ndim() == static_cast<ssize_t>(shape.size());
  ssize_t axis = 0;
  std::string expected = "(";
  for (ssize_t length : shape) {
    matches = matches && (length < 0 || array.shape(axis) == length);
    expected += (axis++ ? ", " : "") + (length < 0 ? std::string("*") : std::to_string(length));
  }
  if (!matches)
    throw std::invalid_argument(std::string(name) + " must have shape " + expected + "), got " + shape_of(array));
}

void check_in(const int64_t* values, ssize_t n, int64_t limit, const char* name) {
  for (ssize_t i = 0; i < n; ++i)
    if (values[i] < 0 || values[i] >= limit)
      throw std::out_of_range(std::string(name) + " must lie in [0, " + std::to_string(limit) + "), got " +
                              std::to_string(values[i]));
}

py::tuple unique(const Array<int64_t>& ids) {
  check_shape(ids, "ids", {-1});
  const ssize_t n = ids.shape(0);
  Array<int64_t> index(n);
  static thread_local KeyIndex seen;
  {
    const int64_t* in = ids.data();
    int64_t* out = index.mutable_data();
    py::gil_scoped_release release;
    seen.clear(n);
    for (ssize_t i = 0; i < n; ++i) out[i] = seen.number(in[i]);
  }
  Array<int64_t> keys(seen.size());
  std::copy(seen.keys().begin(), seen.keys().end(), keys.mutable_data());
  return py::make_tuple(keys, index);
}

// Which of keys (n,) are among others (m,): (n,) bool.
Array<bool> contained(const Array<int64_t>& keys, const Array<int64_t>& others) {
  check_shape(keys, "keys", {-1});
  check_shape(others, "others", {-1});
  const ssize_t n = keys.shape(0), m = others.shape(0);
  Array<bool> found(n);
  static thread_local KeyIndex index;
  index.clear(m);
  for (ssize_t i = 0; i < m; ++i) index.number(others.data()[i]);
  for (ssize_t i = 0; i < n; ++i) found.mutable_data()[i] = index.contains(keys.data()[i]);
  return found;
}

void init_rows(Array<float> weight, const Array<int64_t>& keys, uint64_t seed, float std) {
  check_shape(weight, "weight", {keys.shape(0), -1});
  const ssize_t n = keys.shape(0), dim = weight.shape(1);
  float* out = weight.mutable_data();
  const int64_t* key = keys.data();
  py::gil_scoped_release release;
  for (ssize_t i = 0; i < n; ++i) init_row(out + i * dim, dim, key[i], seed, std);
}

py::tuple locate(const Partition& partition, const Array<int64_t>& keys) {
  const ssize_t n = keys.shape(0);
  Array<int64_t> owner(n), row(n);
  for (ssize_t i = 0; i < n; ++i) {
    const Place place = partition.locate(keys.data()[i]);
    owner.mutable_data()[i] = place.owner;
    row.mutable_data()[i] = place.row;
  }
  return py::make_tuple(owner, row);
}

Array<int64_t> keys_of(const Partition& partition, int64_t rank, int64_t begin, int64_t end) {
  Array<int64_t> keys(end - begin);
  int64_t* out = keys.mutable_data();
  py::gil_scoped_release release;
  for (int64_t row = begin; row < end; ++row) out[row - begin] = partition.key_of(rank, row);
  return keys;
}

py::tuple route_of(const Partition& partition, const Array<int64_t>& keys) {
  const ssize_t n = keys.shape(0);
  Array<int64_t> order(n), rows(n), first(partition.size() + 1);
  const int64_t* key = keys.data();
  int64_t *orders = order.mutable_data(), *row = rows.mutable_data(), *firsts = first.mutable_data();
  {
    static thread_local std::vector<Place> places;
    py::gil_scoped_release release;
    route(partition, key, n, orders, row, firsts, &places);
  }
  return py::make_tuple(order, rows, first);
}

// The part of a route whose keys are chosen (n of the whole batch).
py::tuple part_of_route(const Array<int64_t>& order, const Array<int64_t>& rows, const Array<int64_t>& first,
                        const Array<bool>& chosen) {
  const ssize_t n = order.shape(0), size = first.shape(0) - 1;
  check_shape(rows, "rows", {n});
  check_in(order.data(), n, chosen.shape(0), "order");
  Array<int64_t> out_order(n), out_rows(n), out_first(size + 1);
  const int64_t kept = route_where(order.data(), rows.data(), first.data(), size,
                                   reinterpret_cast<const uint8_t*>(chosen.data()), out_order.mutable_data(),
                                   out_rows.mutable_data(), out_first.mutable_data());
  const py::slice front(0, kept, 1);
  return py::make_tuple(out_order[front], out_rows[front], out_first);
}

// out[order[i]] = from[rows[i]]. copy: one row of `width` numbers; run: calls the loop over rows, without the GIL.
template <typename T, typename Copy, typename Run>
void gather_with(const Array<T>& from, const Array<int64_t>& rows, Array<T>& out, const Array<int64_t>& order,
                 ssize_t width, Copy copy, Run run) {
  const ssize_t n = rows.shape(0);
  check_shape(order, "order", {n});
  const T* source = from.data();
  const int64_t *row = rows.data(), *position = order.data();
  T* to = out.mutable_data();
  const ssize_t num_rows = from.shape(0), num_out = out.shape(0);
  py::gil_scoped_release release;
  check_in(row, n, num_rows, "rows");
  check_in(position, n, num_out, "order");
  run([&] {
    constexpr ssize_t kAhead = 8;  // rows prefetched: a shard is far larger than the caches
    for (ssize_t i = 0; i < n; ++i) {
      if (i + kAhead < n) __builtin_prefetch(source + row[i + kAhead] * width);
      copy(to + position[i] * width, source + row[i] * width);
    }
  });
}

// How gather_with runs its loop where nobody else writes `from`.
constexpr auto kAtOnce = [](auto loop) { loop(); };

template <typename Run>
void gather_rows(const Array<float>& from, const Array<int64_t>& rows, Array<float>& out, const Array<int64_t>& order,
                 Run run) {
  const ssize_t dim = from.shape(1);
  check_shape(out, "out", {-1, dim});
  const auto copy = [dim](float* to, const float* row) { std::memcpy(to, row, dim * sizeof(float)); };
  gather_with(from, rows, out, order, dim, copy, run);
}

void gather(const Array<float>& from, const Array<int64_t>& rows, Array<float> out, const Array<int64_t>& order) {
  gather_rows(from, rows, out, order, kAtOnce);
}

void scatter_add_rows(const Array<float>& values, const Array<int64_t>& rows, Array<float> out) {
  check_shape(rows, "rows", {-1});
  check_shape(out, "out", {-1, -1});
  const ssize_t n = rows.shape(0), dim = out.shape(1), num_out = out.shape(0);
  check_shape(values, "values", {n, dim});
  const float* value = values.data();
  const int64_t* row = rows.data();
  float* to = out.mutable_data();
  py::gil_scoped_release release;
  check_in(row, n, num_out, "rows");
  scatter_add(value, row, n, dim, to);
}

void gather_clocks(const Array<int32_t>& clock, const Array<int64_t>& rows, Array<int32_t> out,
                   const Array<int64_t>& order) {
  check_shape(clock, "clock", {-1});
  check_shape(out, "out", {-1});
  const auto copy = [](int32_t* to, const int32_t* from) { *to = load_clock(from); };
  gather_with(clock, rows, out, order, 1, copy, kAtOnce);
}

Shard shard_of(Array<float>& weight, Array<float>& state, Array<int32_t>& clock, Array<uint8_t>& touched) {
  const ssize_t n = clock.shape(0);
  check_shape(weight, "weight", {n, -1});
  check_shape(state, "state", {n, -1});
  check_shape(touched, "touched", {n});
  return {weight.mutable_data(), state.mutable_data(), clock.mutable_data(), touched.mutable_data(), n, weight.shape(1), state.shape(1)};
}

// Waits by yielding the processor, not by spinning, and when that takes long by sleeping: ranks may outnumber cores.
template <typename Ready>
bool yield_until(Ready ready, double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  for (int tries = 0; !ready(); ++tries) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    if (tries < 50)
      sched_yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

// An array, or null for None; of shape (n, ...) where it is one.
template <typename T>
const T* column(const std::optional<Array<T>>& array, const char* name, bool is_wanted) {
  if (is_wanted != array.has_value())
    throw std::invalid_argument(std::string(name) + (is_wanted ? " are missing" : " have no place in these records"));
  return array ? array->data() : nullptr;
}

// The columns of a message as Python gives them, checked; they live as long as the arrays.
Message message_of(const Array<int64_t>& rows, const Array<float>& values, const Array<int64_t>& order,
                   const std::optional<Array<int32_t>>& clocks, const std::optional<Array<int32_t>>& counts,
                   RecordFormat format) {
  check_shape(order, "order", {rows.shape(0)});
  check_shape(values, "values", {-1, format.width});
  if (clocks) check_shape(*clocks, "clocks", {values.shape(0)});
  if (counts) check_shape(*counts, "counts", {values.shape(0)});
  return {rows.data(), column(clocks, "clocks", format.has_clocks), column(counts, "counts", format.has_clocks),
          values.data()};
}

// The origin's end of one ring, with the arrays it writes kept alive by the caller (see py::keep_alive below).
class Producer {
 public:
  Producer(Array<uint8_t> data, RecordFormat format) : ring_(data.mutable_data(), data.size(), format), format_(format) {}

  int64_t write(int64_t step, const Array<int64_t>& rows, const Array<float>& values, const Array<int64_t>& order,
                const std::optional<Array<int32_t>>& clocks, const std::optional<Array<int32_t>>& counts, int64_t begin,
                bool is_last) {
    const ssize_t n = rows.shape(0);
    if (begin < 0 || begin > n) throw std::out_of_range("begin must lie in [0, " + std::to_string(n) + "]");
    Message message = message_of(rows, values, order, clocks, counts, format_);
    message.rows += begin;
    const int64_t* position = order.data() + begin;
    py::gil_scoped_release release;
    return ring_.write(step, message, position, n - begin, is_last);
  }

  uint64_t head() const { return ring_.head(); }
  uint64_t tail() const { return ring_.tail(); }
  void set_tail(uint64_t tail) { ring_.set_tail(tail); }

 private:
  RingProducer ring_;
  RecordFormat format_;
};

RingHeader* ring_header(Array<uint8_t>& memory) {
  if (memory.size() < static_cast<ssize_t>(sizeof(RingHeader)))
    throw std::invalid_argument("a ring needs at least " + std::to_string(sizeof(RingHeader)) + " bytes");
  return reinterpret_cast<RingHeader*>(memory.mutable_data());
}

uint64_t ring_tail(Array<uint8_t> memory) { return ring_header(memory)->tail.load(std::memory_order_acquire); }

void publish_head(Array<uint8_t> memory, uint64_t head) {
  ring_header(memory)->head.store(head, std::memory_order_release);
}

class PyInbox {
 public:
  PyInbox(Array<uint8_t> rings, int64_t own_rank, Array<float> weight, Array<float> state, Array<int32_t> clock, Array<uint8_t> touched)
      : inbox_(consumers(rings.mutable_data(), rings.shape(1), rings.shape(0), {weight.shape(1), false}), own_rank,
               shard_of(weight, state, clock, touched)),
        dim_(weight.shape(1)) {}

  void begin(int64_t step, Array<int64_t> rows, Array<float> grads) {
    check_shape(grads, "grads", {rows.shape(0), dim_});
    rows_ = rows, grads_ = grads;
    inbox_.begin(step, rows_.data(), grads_.data(), rows_.shape(0));
  }

  bool poll(double timeout_s) {
    py::gil_scoped_release release;
    return yield_until([this] { return inbox_.poll(); }, timeout_s);
  }

  int64_t apply(const RowOptimizer& optimizer) {
    py::gil_scoped_release release;
    return inbox_.apply(optimizer);
  }

  int64_t awaited() const { return inbox_.awaited(); }

 private:
  Inbox inbox_;
  int64_t dim_;
  Array<int64_t> rows_{0};  // of the open step, kept alive
  Array<float> grads_{0};
};

class PyEngine {
 public:
  PyEngine(Array<uint8_t> rings, Array<float> weight, Array<float> state, Array<int32_t> clock, Array<uint8_t> touched,
           RowOptimizer optimizer)
      : format_{optimizer.sum_dim(), true},
        engine_(consumers(rings.mutable_data(), rings.shape(1), rings.shape(0), format_),
                shard_of(weight, state, clock, touched), optimizer) {}

  void set_step(double lr, int64_t step) {
    py::gil_scoped_release release;
    engine_.set_step(lr, step);
  }

  int64_t drain() {
    py::gil_scoped_release release;
    return engine_.drain();
  }

  void start(const std::vector<int64_t>& origins) { engine_.start(origins); }

  void stop() {
    py::gil_scoped_release release;
    engine_.stop();
  }

  void apply(const Array<int64_t>& rows, const Array<float>& values, const Array<int64_t>& order,
             const Array<int32_t>& clocks, const Array<int32_t>& counts) {
    const Message own = message_of(rows, values, order, clocks, counts, format_);
    const int64_t* position = order.data();
    const ssize_t n = rows.shape(0);
    check_in(position, n, values.shape(0), "order");
    py::gil_scoped_release release;
    engine_.apply(own, position, n);
  }

  // gather(), while nobody writes the shard.
  void gather_own(const Array<float>& from, const Array<int64_t>& rows, Array<float> out, const Array<int64_t>& order) {
    gather_rows(from, rows, out, order, [this](auto loop) { engine_.exclusively(loop); });
  }

 private:
  RecordFormat format_;
  Engine engine_;
};

// RowCache with the sums on their way out. Arrays of one batch of n keys: slots (n) int64, clocks (n) int32, chosen (n) bool,
// weights and grads (n, dim), states (n, state_dim) float32.
class PyCache {
 public:
  PyCache(int64_t capacity_rows, RowOptimizer optimizer, const std::string& policy, const std::string& rows)
      : cache_(capacity_rows, optimizer, policy_of(policy), row_type_of(rows)) {}

  void look_up(const Array<int64_t>& keys, Array<int64_t> slots) const {
    const ssize_t n = keys.shape(0);
    check_shape(slots, "slots", {n});
    const int64_t* key = keys.data();
    int64_t* out = slots.mutable_data();
    py::gil_scoped_release release;
    cache_.look_up(key, n, out);
  }

  int64_t validate(const Array<int64_t>& slots, const Array<int32_t>& owner_clocks, int64_t staleness,
                   Array<bool> is_stale, bool counts_lags) {
    const ssize_t n = checked(slots);
    check_shape(owner_clocks, "owner_clocks", {n});
    check_shape(is_stale, "is_stale", {n});
    const int64_t* slot = slots.data();
    const int32_t* clock = owner_clocks.data();
    uint8_t* stale = reinterpret_cast<uint8_t*>(is_stale.mutable_data());
    py::gil_scoped_release release;
    return cache_.validate(slot, clock, n, staleness, stale, counts_lags ? &lags_ : nullptr);
  }

  void refresh(const Array<int64_t>& slots, const Array<bool>& chosen, const Array<float>& weights,
               const Array<float>& states, const Array<int32_t>& clocks, float anticipate) {
    const ssize_t n = checked(slots);
    check_rows(n, chosen, weights, states, clocks);
    const int64_t* slot = slots.data();
    const int32_t* clock = clocks.data();
    const auto* mask = reinterpret_cast<const uint8_t*>(chosen.data());
    const float *weight = weights.data(), *state = states.data();
    py::gil_scoped_release release;
    cache_.refresh(slot, mask, weight, state, clock, n, anticipate);
  }

  int64_t insert_and_evict(const Array<int64_t>& keys, const Array<bool>& chosen, const Array<float>& weights,
                           const Array<float>& states, const Array<int32_t>& clocks, Array<int64_t> slots) {
    const ssize_t n = checked(slots);
    check_shape(keys, "keys", {n});
    check_rows(n, chosen, weights, states, clocks);
    const int64_t* key = keys.data();
    const int32_t* clock = clocks.data();
    const auto* mask = reinterpret_cast<const uint8_t*>(chosen.data());
    const float *weight = weights.data(), *state = states.data();
    int64_t* slot = slots.mutable_data();
    py::gil_scoped_release release;
    return cache_.insert_and_evict(key, mask, weight, state, clock, n, slot, &pushes_);
  }

  void gather(const Array<int64_t>& slots, Array<float> out) {
    const ssize_t n = checked(slots);
    check_shape(out, "out", {n, cache_.dim()});
    const int64_t* slot = slots.data();
    float* to = out.mutable_data();
    py::gil_scoped_release release;
    cache_.gather(slot, n, to);
  }

  void update(const Array<int64_t>& slots, const Array<float>& grads, float anticipate) {
    const ssize_t n = checked(slots);
    check_shape(grads, "grads", {n, cache_.dim()});
    const int64_t* slot = slots.data();
    const float* grad = grads.data();
    py::gil_scoped_release release;
    cache_.update(slot, grad, n, anticipate);
  }

  void pass_on(const Array<int64_t>& keys, const Array<int64_t>& slots, const Array<int32_t>& clocks,
               const Array<float>& grads) {
    const ssize_t n = checked(slots);
    check_shape(keys, "keys", {n});
    check_shape(clocks, "clocks", {n});
    check_shape(grads, "grads", {n, cache_.dim()});
    const int64_t *key = keys.data(), *slot = slots.data();
    const int32_t* clock = clocks.data();
    const float* grad = grads.data();
    py::gil_scoped_release release;
    cache_.pass_on(key, slot, clock, grad, n, &pushes_);
  }

  void take_due(const Array<int64_t>& slots, int64_t staleness, const Array<int64_t>& held) {
    const ssize_t n = checked(slots);
    const int64_t* slot = slots.data();
    std::vector<int64_t> kept(held.data(), held.data() + checked(held));
    py::gil_scoped_release release;
    std::sort(kept.begin(), kept.end());
    cache_.take_pending(slot, n, staleness, kept, &pushes_);
  }

  void use(const Array<int64_t>& slots, int64_t num_keys) { cache_.use(slots.data(), checked(slots), num_keys); }

  Array<int32_t> clocks_within(const Array<int64_t>& slots, bool will_write, int64_t staleness) const {
    const ssize_t n = checked(slots);
    Array<int32_t> clocks(n);
    cache_.clocks_within(slots.data(), n, will_write, staleness, clocks.mutable_data());
    return clocks;
  }

  void preview(const Array<int64_t>& positions, Array<float> weights, Array<float> states, Array<int32_t> clocks,
               const Array<float>& sums, const Array<int32_t>& counts, float anticipate) const {
    const ssize_t m = positions.shape(0), n = clocks.shape(0);
    check_in(positions.data(), m, n, "positions");
    check_shape(weights, "weights", {n, cache_.dim()});
    check_shape(states, "states", {n, cache_.state_dim()});
    check_shape(sums, "sums", {m, cache_.sum_dim()});
    check_shape(counts, "counts", {m});
    cache_.preview(positions.data(), m, sums.data(), counts.data(), anticipate, weights.mutable_data(),
                   states.mutable_data(), clocks.mutable_data());
  }

  // Lines whose pending sum is of at least `least` iterations: (n,) bool.
  Array<bool> counts_from(const Array<int64_t>& slots, int64_t least) const {
    const ssize_t n = checked(slots);
    Array<bool> out(n);
    for (ssize_t i = 0; i < n; ++i)
      out.mutable_data()[i] = slots.data()[i] >= 0 && cache_.count(slots.data()[i]) >= least;
    return out;
  }

  // Keys of all that was handed out since the last take_pushes: (n,) int64.
  Array<int64_t> handed_out() const { return Array<int64_t>(pushes_.keys.size(), pushes_.keys.data()); }

  void take_all() {
    py::gil_scoped_release release;
    cache_.take_pending(&pushes_);
  }

  // keys, clocks, counts, sums of all that was handed out since the last call.
  py::tuple take_pushes() {
    const ssize_t n = pushes_.keys.size();
    py::array sums = owned(std::move(pushes_.sums)).reshape({n, ssize_t{cache_.sum_dim()}});
    py::tuple taken = py::make_tuple(owned(std::move(pushes_.keys)), owned(std::move(pushes_.clocks)),
                                     owned(std::move(pushes_.counts)), sums);
    pushes_ = Pushes();
    return taken;
  }

  Array<int32_t> clocks(const Array<int64_t>& slots) const {
    const ssize_t n = checked(slots);
    Array<int32_t> out(n);
    for (ssize_t i = 0; i < n; ++i) out.mutable_at(i) = slots.at(i) < 0 ? -1 : cache_.clock(slots.at(i));
    return out;
  }

  Array<int64_t> lags() const { return Array<int64_t>(LagHistogram::kBins, lags_.bins); }
  int64_t num_pushes() const { return static_cast<int64_t>(pushes_.keys.size()); }

  RowCache cache_;

 private:
  // The array that owns what was the vector's.
  template <typename T>
  static py::array_t<T> owned(std::vector<T>&& values) {
    auto* kept = new std::vector<T>(std::move(values));
    py::capsule owner(kept, [](void* p) { delete static_cast<std::vector<T>*>(p); });
    return py::array_t<T>(kept->size(), kept->data(), owner);
  }

  ssize_t checked(const Array<int64_t>& slots) const {
    check_shape(slots, "slots", {-1});
    const ssize_t n = slots.shape(0);
    const int64_t* slot = slots.data();
    for (ssize_t i = 0; i < n; ++i)
      if (slot[i] < -1 || slot[i] >= cache_.num_slots())
        throw std::out_of_range("slots must lie in [-1, " + std::to_string(cache_.num_slots()) + "), got " +
                                std::to_string(slot[i]));
    return n;
  }

  void check_rows(ssize_t n, const Array<bool>& chosen, const Array<float>& weights, const Array<float>& states,
                  const Array<int32_t>& clocks) const {
    check_shape(chosen, "chosen", {n});
    check_shape(weights, "weights", {n, cache_.dim()});
    check_shape(states, "states", {n, cache_.state_dim()});
    check_shape(clocks, "clocks", {n});
  }

  Pushes pushes_;
  LagHistogram lags_;
};

// What an owner makes of one rank's sums, for tests: rows of weight (n, dim), state (n, state_dim), sums (n, sum_dim).
void apply_sums(const RowOptimizer& rule, Array<float> weight, Array<float> state, const Array<float>& sums, int64_t count,
                int64_t advance) {
  const ssize_t n = weight.shape(0);
  check_shape(weight, "weight", {n, rule.dim()});
  check_shape(state, "state", {n, rule.state_dim()});
  check_shape(sums, "sums", {n, rule.sum_dim()});
  for (ssize_t i = 0; i < n; ++i)
    rule.apply(weight.mutable_data() + i * rule.dim(), state.mutable_data() + i * rule.state_dim(),
               rule.summed(sums.data() + i * rule.sum_dim(), count, advance));
}

// One step of the rows that any rank touched, as an owner makes it: grads (n, dim) summed over ranks, touched (n) > 0.
void apply_touched(const RowOptimizer& rule, Array<float> weight, Array<float> state, Array<int32_t> clock,
                   const Array<float>& grads, const Array<float>& touched) {
  const ssize_t n = clock.shape(0);
  check_shape(weight, "weight", {n, rule.dim()});
  check_shape(state, "state", {n, rule.state_dim()});
  check_shape(grads, "grads", {n, rule.dim()});
  check_shape(touched, "touched", {n});
  float *weights = weight.mutable_data(), *states = state.mutable_data();
  int32_t* clocks = clock.mutable_data();
  const float *grad = grads.data(), *count = touched.data();
  py::gil_scoped_release release;
  for (ssize_t row = 0; row < n; ++row) {
    if (count[row] <= 0) continue;
    rule.apply(weights + row * rule.dim(), states + row * rule.state_dim(), {grad + row * rule.dim()});
    ++clocks[row];
  }
}

}  // namespace
}  // namespace hetmpi

PYBIND11_MODULE(_C, m) {
  using namespace hetmpi;
  m.doc() = "C++ core of hetmpi: unique keys, rows, row optimizers, rings between ranks.";
  m.attr("RING_HEADER_BYTES") = sizeof(RingHeader);
  m.attr("UNBOUNDED") = kUnbounded;
  m.attr("UNKNOWN_CLOCK") = kUnknownClock;
  m.attr("NO_LINE") = kNoLine;
  m.attr("WAYS") = kWays;
  m.attr("LINE_OVERHEAD_BYTES") = RowCache::kLineOverhead;

  py::class_<RecordFormat>(m, "RecordFormat", "What is sent of each row (cpp/ring.h).")
      .def(py::init<int64_t, bool>(), py::arg("width"), py::arg("has_clocks"))
      .def_readonly("width", &RecordFormat::width)
      .def_readonly("has_clocks", &RecordFormat::has_clocks)
      .def_property_readonly("row_bytes", &RecordFormat::row_bytes);
  m.def("min_ring_capacity", &min_ring_capacity, py::arg("format"));

  py::class_<Partition>(m, "Partition", "Which rank owns a key, and at which row of its shard (cpp/partition.h).")
      .def(py::init<const std::string&, int64_t, int64_t>(), py::arg("kind"), py::arg("num_rows"), py::arg("size"))
      .def_property_readonly("size", &Partition::size)
      .def("num_local_rows", &Partition::num_local_rows, py::arg("rank"), "Rows of a rank's shard.")
      .def("locate", &locate, py::arg("keys").noconvert(), "keys (n,) int64 -> owner (n,) int64, row (n,) int64.")
      .def("keys_of", &keys_of, py::arg("rank"), py::arg("begin"), py::arg("end"),
           "Keys of rows [begin, end) of a rank's shard: (end - begin,) int64.")
      .def("route", &route_of, py::arg("keys").noconvert(), "keys (n,) int64 -> order, rows, first of their Route.");
  m.def("part_of_route", &part_of_route, py::arg("order").noconvert(), py::arg("rows").noconvert(),
        py::arg("first").noconvert(), py::arg("chosen").noconvert(),
        "order, rows, first of the part of a Route whose keys are chosen (n,) bool.");

  m.def("unique", &unique, py::arg("ids").noconvert(),
        "ids (N,) int64 -> keys (U,) int64 in order of first appearance, index (N,) int64 with ids == keys[index].");
  m.def("contained", &contained, py::arg("keys").noconvert(), py::arg("others").noconvert(),
        "Which of keys (n,) int64 are among others (m,) int64: (n,) bool.");
  m.def("init_rows", &init_rows, py::arg("weight").noconvert(), py::arg("keys").noconvert(), py::arg("seed"),
        py::arg("std"), "weight (n, dim) float32 = std * normal(seed, key, column), for keys (n,) int64.");
  m.def("gather", &gather, py::arg("weight").noconvert(), py::arg("rows").noconvert(), py::arg("out").noconvert(),
        py::arg("order").noconvert(), "out[order[i]] = weight[rows[i]]; float32 rows, int64 rows (n,) and order (n,).");
  m.def("scatter_add", &scatter_add_rows, py::arg("values").noconvert(), py::arg("rows").noconvert(), py::arg("out").noconvert(),
        "out[rows[i]] += values[i], i in order; float32 values (n, dim) and out (m, dim), int64 rows (n,).");
  m.def("gather_clocks", &gather_clocks, py::arg("clock").noconvert(), py::arg("rows").noconvert(),
        py::arg("out").noconvert(), py::arg("order").noconvert(), "out[order[i]] = clock[rows[i]], each read whole.");

  py::class_<RowOptimizer>(m, "RowOptimizer")
      .def(py::init<const std::string&, int64_t, float, float, float, float>(), py::arg("rule"), py::arg("dim"),
           py::arg("weight_decay"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"))
      .def_property_readonly("state_dim", &RowOptimizer::state_dim)
      .def_property_readonly("sum_dim", &RowOptimizer::sum_dim)
      .def("apply_sums", &apply_sums, py::arg("weight").noconvert(), py::arg("state").noconvert(),
           py::arg("sums").noconvert(), py::arg("count"), py::arg("advance"))
      .def("apply_touched", &apply_touched, py::arg("weight").noconvert(), py::arg("state").noconvert(),
           py::arg("clock").noconvert(), py::arg("grads").noconvert(), py::arg("touched").noconvert())
      .def("set_step", &RowOptimizer::set_step, py::arg("lr"), py::arg("step"));

  py::class_<Producer>(m, "Producer", "The origin's end of one ring (cpp/ring.h). REQUIRES: order in [0, len(grads)), as Route makes it.")
      .def(py::init<Array<uint8_t>, RecordFormat>(), py::arg("data").noconvert(), py::arg("format"),
           py::keep_alive<1, 2>())
      .def("write", &Producer::write, py::arg("step"), py::arg("rows").noconvert(), py::arg("values").noconvert(),
           py::arg("order").noconvert(), py::arg("clocks").noconvert(), py::arg("counts").noconvert(), py::arg("begin"),
           py::arg("is_last"))
      .def_property_readonly("tail", &Producer::tail)
      .def("set_tail", &Producer::set_tail, py::arg("tail"))
      .def_property_readonly("head", &Producer::head);
  m.def("ring_tail", &ring_tail, py::arg("memory").noconvert());
  m.def("publish_head", &publish_head, py::arg("memory").noconvert(), py::arg("head"));

  py::class_<PyInbox>(m, "Inbox", "The owner's side of one synchronous step (cpp/inbox.h).")
      .def(py::init<Array<uint8_t>, int64_t, Array<float>, Array<float>, Array<int32_t>, Array<uint8_t>>(),
           py::arg("rings").noconvert(), py::arg("own_rank"), py::arg("weight").noconvert(), py::arg("state").noconvert(),
           py::arg("clock").noconvert(), py::arg("touched").noconvert(), py::keep_alive<1, 2>(), py::keep_alive<1, 4>(),
           py::keep_alive<1, 5>(), py::keep_alive<1, 6>(), py::keep_alive<1, 7>())
      .def("begin", &PyInbox::begin, py::arg("step"), py::arg("rows").noconvert(), py::arg("grads").noconvert())
      .def("poll", &PyInbox::poll, py::arg("timeout_s"))
      .def("apply", &PyInbox::apply, py::arg("optimizer"))
      .def_property_readonly("awaited", &PyInbox::awaited);

  py::class_<PyEngine>(m, "Engine", "The owner's side at staleness s >= 1: a thread that applies what arrives (cpp/engine.h).")
      .def(py::init<Array<uint8_t>, Array<float>, Array<float>, Array<int32_t>, Array<uint8_t>, RowOptimizer>(),
           py::arg("rings").noconvert(), py::arg("weight").noconvert(), py::arg("state").noconvert(),
           py::arg("clock").noconvert(), py::arg("touched").noconvert(), py::arg("optimizer"), py::keep_alive<1, 2>(),
           py::keep_alive<1, 3>(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::keep_alive<1, 6>())
      .def("set_step", &PyEngine::set_step, py::arg("lr"), py::arg("step"))
      .def("drain", &PyEngine::drain, "Applies what has arrived; returns the rows applied.")
      .def("apply", &PyEngine::apply, py::arg("rows").noconvert(), py::arg("values").noconvert(),
           py::arg("order").noconvert(), py::arg("clocks").noconvert(), py::arg("counts").noconvert())
      .def("gather", &PyEngine::gather_own, py::arg("weight").noconvert(), py::arg("rows").noconvert(),
           py::arg("out").noconvert(), py::arg("order").noconvert())
      .def("start", &PyEngine::start, py::arg("origins"), "Begins to take in what these ranks send.")
      .def("stop", &PyEngine::stop);

  py::class_<PyCache>(m, "RowCache", "Rows a rank keeps, with gradients not pushed yet (cpp/row_cache.h).")
      .def(py::init<int64_t, RowOptimizer, const std::string&, const std::string&>(), py::arg("capacity_rows"), py::arg("optimizer"),
           py::arg("policy"), py::arg("rows") = "float32")
      .def_property_readonly("capacity_rows", [](const PyCache& c) { return c.cache_.capacity_rows(); })
      .def_property_readonly("num_rows", [](const PyCache& c) { return c.cache_.num_rows(); })
      .def_property_readonly("num_pending", [](const PyCache& c) { return c.cache_.num_pending(); })
      .def_property_readonly("num_pushes", &PyCache::num_pushes, "Sums handed out and not taken yet.")
      .def_property_readonly("lags", &PyCache::lags)
      .def("set_step", [](PyCache& c, double lr, int64_t step) { c.cache_.set_step(lr, step); }, py::arg("lr"),
           py::arg("step"))
      .def("look_up", &PyCache::look_up, py::arg("keys").noconvert(), py::arg("slots").noconvert())
      .def("validate", &PyCache::validate, py::arg("slots").noconvert(), py::arg("owner_clocks").noconvert(),
           py::arg("staleness"), py::arg("is_stale").noconvert(), py::arg("counts_lags"))
      .def("refresh", &PyCache::refresh, py::arg("slots").noconvert(), py::arg("chosen").noconvert(),
           py::arg("weights").noconvert(), py::arg("states").noconvert(), py::arg("clocks").noconvert(),
           py::arg("anticipate"))
      .def("insert_and_evict", &PyCache::insert_and_evict, py::arg("keys").noconvert(), py::arg("chosen").noconvert(),
           py::arg("weights").noconvert(), py::arg("states").noconvert(), py::arg("clocks").noconvert(),
           py::arg("slots").noconvert())
      .def("gather", &PyCache::gather, py::arg("slots").noconvert(), py::arg("out").noconvert())
      .def("update", &PyCache::update, py::arg("slots").noconvert(), py::arg("grads").noconvert(), py::arg("anticipate"))
      .def("pass_on", &PyCache::pass_on, py::arg("keys").noconvert(), py::arg("slots").noconvert(),
           py::arg("clocks").noconvert(), py::arg("grads").noconvert())
      .def("take_due", &PyCache::take_due, py::arg("slots").noconvert(), py::arg("staleness"), py::arg("held").noconvert())
      .def("counts_from", &PyCache::counts_from, py::arg("slots").noconvert(), py::arg("least"))
      .def("use", &PyCache::use, py::arg("slots").noconvert(), py::arg("num_keys"))
      .def("clocks_within", &PyCache::clocks_within, py::arg("slots").noconvert(), py::arg("will_write"),
           py::arg("staleness"))
      .def("preview", &PyCache::preview, py::arg("positions").noconvert(), py::arg("weights").noconvert(),
           py::arg("states").noconvert(), py::arg("clocks").noconvert(), py::arg("sums").noconvert(),
           py::arg("counts").noconvert(), py::arg("anticipate"))
      .def("handed_out", &PyCache::handed_out)
      .def("take_all", &PyCache::take_all)
      .def("take_pushes", &PyCache::take_pushes)
      .def("clocks", &PyCache::clocks, py::arg("slots").noconvert(), "c_c of each line, -1 where there is none.");

#ifdef HETMPI_CUDA
  m.attr("has_cuda") = true;
  bind_cuda(m);
#else
  m.attr("has_cuda") = false;
  m.def("gpu_problem", [] { return "hetmpi._C was built without nvcc"; }, "Why no GPU can be used here.");
#endif
}
