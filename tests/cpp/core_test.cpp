// Tests of the C++ core in a separate program, to be built with sanitizers (tests/cpp/test_core.py): the cache compared
// with a slow, obvious model, rings and the push applier between threads, a server of rounds, the step reducer's order.
// Exit code 0 if all hold, otherwise 1 with the failure on stderr.
//
//   core_test [SEED]   default 1; it determines all random choices except the threads' timing
//
// Gradients are small integers held in floats wherever sums are compared: their sums are exact in any order.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "cache/row_cache.h"
#include "client/bounded.h"
#include "client/exact.h"
#include "client/host_lines.h"
#include "client/keys.h"
#include "client/pull_parts.h"
#include "owner/push_applier.h"
#include "owner/rank_sums.h"
#include "owner/route.h"
#include "owner/step_reducer.h"
#include "wire/exchange.h"
#include "wire/request.h"
#include "wire/ring_writer.h"
#include "wire/server.h"

namespace hetmpi {
namespace {

using Floats = std::vector<float>;
using Ints = std::vector<int64_t>;
using Clocks = std::vector<int32_t>;
using Random = std::mt19937_64;
using Seconds = std::chrono::duration<double>;

std::string current_case;  // set while no other thread runs

// Ends the process at once: other threads may still run.
[[noreturn]] void fail(const char* file, int line, const char* what) {
  std::fprintf(stderr, "%s:%d: not so: %s\n  in %s\n", file, line, what, current_case.c_str());
  std::fflush(stderr);
  _exit(1);
}

#define CHECK(claim) ((claim) ? void() : fail(__FILE__, __LINE__, #claim))

template <typename Error, typename Call>
bool throws(Call call) {
  try {
    call();
  } catch (const Error&) {
    return true;
  }
  return false;
}

template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

int64_t pick(Random& random, int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); }
bool once_in(Random& random, int64_t n) { return pick(random, n) == 0; }
int64_t pick_in(Random& random, int64_t low, int64_t high) { return low + pick(random, high - low + 1); }

Floats integers(Random& random, int64_t n, int64_t low, int64_t high) {
  Floats values(n);
  for (float& value : values) value = static_cast<float>(pick_in(random, low, high));
  return values;
}

void shuffle(Ints& values, Random& random) {
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[pick(random, i)]);
}

Ints permutation(Random& random, int64_t n) {
  Ints order(n);
  std::iota(order.begin(), order.end(), 0);
  shuffle(order, random);
  return order;
}

void sleep(std::chrono::microseconds time) { std::this_thread::sleep_for(time); }

// Waits until `is_so`, by yielding and then by sleeping, as threads may outnumber cores; fails after a minute.
template <typename Claim>
void await(Claim is_so) {
  const auto began = std::chrono::steady_clock::now();
  for (int tries = 0; !is_so(); ++tries) {
    CHECK(std::chrono::steady_clock::now() - began < Seconds(60));
    if (tries < 50)
      sched_yield();
    else
      sleep(std::chrono::microseconds(50));
  }
}

// The cache.

constexpr int64_t kDim = 4;  // a power of two: the mean of a row's squares is exact
constexpr float kDecay = 0.25f;
constexpr const char* kRules[] = {"sgd", "adagrad", "rowwise_adagrad", "adam", "momentum", "ftrl"};

RowOptimizer optimizer_of(const std::string& rule) {
  RowOptimizer optimizer(rule, kDim, rule == "sgd" ? 0 : kDecay, 0.5f, 0.75f, 1e-8f);
  optimizer.set_step(1, 1);
  return optimizer;
}

// A push of one key.
struct Push {
  int64_t key, clock, count, first, last;
  Floats sums;

  bool operator==(const Push& other) const {
    return key == other.key && clock == other.clock && count == other.count && first == other.first &&
           last == other.last && sums == other.sums;
  }
};

std::vector<Push> listed(const ReleasedSums& pushes, int64_t sum_dim) {
  std::vector<Push> list;
  for (size_t i = 0; i < pushes.keys.size(); ++i) {
    const float* sums = pushes.sums.data() + i * sum_dim;
    const int64_t num_defined = pushes.counts[i] == 1 ? kDim : sum_dim;
    const Steps steps = pushes.steps[i];
    list.push_back({pushes.keys[i], pushes.clocks[i], pushes.counts[i], steps.first, steps.last,
                    Floats(sums, sums + num_defined)});
  }
  CHECK(pushes.sums.size() == pushes.keys.size() * sum_dim);
  return list;
}

// The cache's slow twin: it keeps pending gradients one by one. It is given the slots of new lines and checks them.
class ModelCache {
 public:
  ModelCache(int64_t capacity, const std::string& rule, Policy policy, float anticipate)
      : rule_(rule),
        optimizer_(optimizer_of(rule)),
        policy_(policy),
        anticipate_(anticipate),
        ways_(std::min<int64_t>(capacity, kWays)),
        num_sets_(ways_ == 0 ? 0 : capacity / ways_),
        lines_(num_sets_ * kWays) {}

  int64_t capacity_rows() const { return num_sets_ * ways_; }
  int64_t num_slots() const { return static_cast<int64_t>(lines_.size()); }
  int64_t num_rows() const { return static_cast<int64_t>(slot_of_.size()); }
  int64_t num_pending() const {
    return std::count_if(lines_.begin(), lines_.end(), [](const auto& line) { return line && !line->pending.empty(); });
  }
  int64_t clock(int64_t slot) const { return lines_[slot]->clock; }
  const Floats& weight(int64_t slot) const { return lines_[slot]->weight; }

  void set_step(double lr, int64_t step) {
    optimizer_.set_step(lr, step);
    step_ = step;
  }

  int64_t look_up(int64_t key) const {
    const auto found = slot_of_.find(key);
    return found == slot_of_.end() ? -1 : found->second;
  }

  void begin_iteration(int64_t num_keys) {
    ++now_;
    uses_ += num_keys;
    if (policy_ == Policy::kLru || uses_ < kUsesPerAgeing * capacity_rows()) return;
    for (auto& line : lines_)
      if (line) line->score /= 2;
    uses_ = 0;
  }

  void use(int64_t slot) {
    Line& line = *lines_[slot];
    line.used = now_;
    if (policy_ == Policy::kLfu) ++line.score;
    if (policy_ == Policy::kLfuOpt) line.score = std::min<int64_t>(line.score + 1, 10);
  }

  bool is_stale(int64_t slot, int64_t owner_clock, int64_t staleness) const {
    const Line& line = *lines_[slot];
    return staleness >= 0 && (line.age > staleness || owner_clock - line.clock > staleness);
  }

  void refresh(int64_t slot, const Floats& weight, const Floats& state, int64_t clock) {
    Line& line = *lines_[slot];
    const int64_t count = static_cast<int64_t>(line.pending.size());
    line.weight = weight, line.state = state, line.clock = clock + count, line.age = 0;
    if (count > 0) preview(line, sums_of(line.pending), count);
  }

  // Inserts a line for `key` at the slot that the cache chose; returns the push of the evicted line. -1: no line.
  std::optional<Push> insert(int64_t key, int64_t slot, const Floats& weight, const Floats& state, int64_t clock) {
    CHECK(may_take(slot, key));
    if (slot < 0) return {};
    const auto left = take(slot);
    if (lines_[slot]) slot_of_.erase(lines_[slot]->key);
    lines_[slot] = Line{key, policy_ == Policy::kLru ? 0 : 1, now_, clock, 0, weight, state, {}, {}};
    slot_of_[key] = slot;
    return left;
  }

  bool is_taken(int64_t slot) const { return lines_[slot].has_value(); }

  void update(int64_t slot, const Floats& grad) {
    Line& line = *lines_[slot];
    line.pending.push_back(grad);
    line.steps.push_back(step_);
    ++line.clock, ++line.age;
    preview(line, grad, 0);
  }

  bool is_due(int64_t slot, int64_t staleness) const {
    const Line& line = *lines_[slot];
    return staleness >= 0 && static_cast<int64_t>(line.pending.size()) > staleness;
  }

  std::optional<Push> take(int64_t slot) {
    if (!lines_[slot] || lines_[slot]->pending.empty()) return {};
    const auto pending = std::exchange(lines_[slot]->pending, {});
    const auto steps = std::exchange(lines_[slot]->steps, {});
    return Push{lines_[slot]->key, lines_[slot]->clock, static_cast<int64_t>(pending.size()),
                steps.front(),     steps.back(),        pushed(pending)};
  }

  // The sum of the gradients, and by rule the sum of their squares or of the squares' mean.
  Floats sums_of(const std::vector<Floats>& grads) const {
    Floats sums(optimizer_.sum_dim(), 0.0f);
    for (const Floats& grad : grads)
      for (int64_t d = 0; d < kDim; ++d) {
        sums[d] += grad[d];
        if (rule_ == "adagrad" || rule_ == "adam" || rule_ == "ftrl") sums[kDim + d] += grad[d] * grad[d];
        if (rule_ == "rowwise_adagrad") sums[kDim] += grad[d] * grad[d] / kDim;
      }
    return sums;
  }

  // What a push has of these gradients: the squares of a single one are left to the owner.
  Floats pushed(const std::vector<Floats>& grads) const {
    Floats sums = sums_of(grads);
    if (grads.size() == 1) sums.resize(kDim);
    return sums;
  }

 private:
  static constexpr int64_t kUsesPerAgeing = 8;  // per line, as RowCache::kAgeAfter

  struct Line {
    int64_t key, score, used, clock, age;
    Floats weight, state;
    std::vector<Floats> pending;  // (iterations, dim)
    Ints steps;                   // of these iterations
  };

  // Whether `slot` may get a line for `key`: an empty one of its set, otherwise one of least worth among those not used
  // in this iteration, otherwise none.
  bool may_take(int64_t slot, int64_t key) const {
    if (num_sets_ == 0) return slot == -1;
    const int64_t first = kWays * static_cast<int64_t>(set_of(mix64(static_cast<uint64_t>(key)), num_sets_));
    const auto begin = lines_.begin() + first, end = begin + ways_;
    const bool lies_in_set = slot >= first && slot < first + ways_;
    if (std::any_of(begin, end, [](const auto& line) { return !line; })) return lies_in_set && !lines_[slot];
    std::pair<int64_t, int64_t> least{std::numeric_limits<int64_t>::max(), 0};
    for (auto line = begin; line != end; ++line)
      if ((*line)->used != now_) least = std::min(least, {(*line)->score, (*line)->used});
    if (least.first == std::numeric_limits<int64_t>::max()) return slot == -1;
    return lies_in_set && lines_[slot]->used != now_ && std::pair(lines_[slot]->score, lines_[slot]->used) == least;
  }

  // Applies one gradient (count 0) or sums over `count` iterations: sgd by hand, at learning rate 1; other rules by the
  // optimizer, which has its own tests (tests/unit/test_optim.py).
  void preview(Line& line, const Floats& grads, int64_t count) {
    if (rule_ == "sgd") {
      for (int64_t d = 0; d < kDim; ++d) line.weight[d] -= anticipate_ * grads[d];
    } else if (count == 0) {
      optimizer_.preview(line.weight.data(), line.state.data(),
                         {grads.data(), nullptr, anticipate_, 1, optimizer_.squares_of(anticipate_),
                          std::max<int64_t>(line.age, static_cast<int64_t>(line.steps.size()))});
    } else {
      const Gradient sums = optimizer_.summed(grads.data(), grads.data() + kDim, count, anticipate_);
      optimizer_.preview(line.weight.data(), line.state.data(), sums);
    }
  }

  std::string rule_;
  RowOptimizer optimizer_;
  Policy policy_;
  float anticipate_;
  int64_t ways_, num_sets_, now_ = 0, uses_ = 0, step_ = 0;
  std::vector<std::optional<Line>> lines_;  // by slot
  std::unordered_map<int64_t, int64_t> slot_of_;
};

// A cache and its model, driven through the same random iterations.
class CacheTrial {
 public:
  CacheTrial(int64_t capacity, const std::string& rule, Policy policy, uint64_t seed)
      : random_(seed),
        rule_(rule),
        num_keys_(3 * capacity + 40),
        anticipate_(static_cast<float>(pick_in(random_, 1, 3))),
        optimizer_(optimizer_of(rule)),
        cache_(capacity, optimizer_, policy),
        model_(capacity, rule, policy, anticipate_) {}

  void run(int64_t iterations) {
    CHECK(cache_.capacity_rows() == model_.capacity_rows() && cache_.num_slots() == model_.num_slots());
    for (step_ = 1; step_ <= iterations; ++step_) iterate();
    take_all();
    CHECK(cache_.num_pending() == 0);
    for (const auto& [key, sum] : outstanding_) CHECK(sum == Floats(kDim, 0.0f));
  }

 private:
  void iterate() {
    staleness_ = std::array<int64_t, 6>{kUnbounded, 0, 1, 2, 5, 20}[pick(random_, 6)];
    draw();
    look_at_others();
    const bool counts_as_use = !once_in(random_, 6);
    find(counts_as_use);
    refresh();
    if (counts_as_use) insert();  // otherwise it might evict lines of this batch
    read();
    if (once_in(random_, 5)) return;  // rows read and not written
    update();
    if (once_in(random_, 10)) take_all();
  }

  // The batch: some of the keys, low ones more often, sometimes more than there are lines; and the owners' rows. Every
  // other period of iterations has hardly more keys than lines, so that all lines are used often.
  void draw() {
    const bool is_narrow = step_ / 20 % 2 == 1;
    const int64_t range = is_narrow ? cache_.capacity_rows() + 1 : num_keys_;
    const int64_t most = is_narrow || once_in(random_, 4) ? range : std::max<int64_t>(cache_.capacity_rows() / 4, 8);
    std::unordered_set<int64_t> seen;
    keys_.clear();
    for (int64_t left = pick_in(random_, 0, most); left > 0; --left) {
      const int64_t key = std::min(pick(random_, range), pick(random_, range)) * 1000003 - 5;
      if (seen.insert(key).second) keys_.push_back(key);
    }
    n_ = static_cast<int64_t>(keys_.size());
    weights_ = integers(random_, n_ * kDim, -1000, 1000);
    states_ = integers(random_, n_ * cache_.preview_dim(), 1, 50);
    clocks_.resize(n_);
    chosen_.assign(n_, 0);
    slots_.assign(n_, -2);
  }

  Floats row(const Floats& rows, int64_t i, int64_t width = kDim) const {
    return Floats(rows.begin() + i * width, rows.begin() + (i + 1) * width);
  }

  Floats state(int64_t i) const { return row(states_, i, cache_.preview_dim()); }

  // Only look_up: later evictions show that it does not count as a use.
  void look_at_others() {
    Ints keys(70), slots(70);
    for (int64_t& key : keys) key = pick(random_, num_keys_) * 1000003 - 5;
    cache_.look_up(keys.data(), 70, slots.data());
    for (int64_t i = 0; i < 70; ++i) CHECK(slots[i] == model_.look_up(keys[i]));
  }

  void find(bool counts_as_use) {
    if (counts_as_use) {
      model_.begin_iteration(n_);
      cache_.look_up(keys_.data(), n_, slots_.data());
      cache_.use(slots_.data(), n_, n_);
    } else {
      cache_.look_up(keys_.data(), n_, slots_.data());
    }
    for (int64_t i = 0; i < n_; ++i) {
      CHECK(slots_[i] == model_.look_up(keys_[i]));
      if (counts_as_use && slots_[i] >= 0) model_.use(slots_[i]);
    }
  }

  // Owners' clocks close to those of the lines; refreshes stale lines, and some others.
  void refresh() {
    for (int64_t i = 0; i < n_; ++i)
      clocks_[i] = static_cast<int32_t>(pick(random_, 30) + (slots_[i] < 0 ? 0 : model_.clock(slots_[i]) - 10));
    validate();
    for (int64_t i = 0; i < n_; ++i) {
      if (slots_[i] >= 0 && once_in(random_, 10)) chosen_[i] = 1;
      if (slots_[i] < 0) chosen_[i] = pick(random_, 2);  // must be skipped
      if (slots_[i] >= 0 && chosen_[i]) model_.refresh(slots_[i], row(weights_, i), state(i), clocks_[i]);
    }
    cache_.refresh(slots_.data(), chosen_.data(), weights_.data(), states_.data(), clocks_.data(), n_, anticipate_);
  }

  void validate() {
    LagHistogram lags, expected;
    const int64_t num_stale = cache_.validate(slots_.data(), clocks_.data(), n_, staleness_, chosen_.data(), &lags);
    int64_t expected_stale = 0;
    for (int64_t i = 0; i < n_; ++i) {
      const bool is_stale = slots_[i] >= 0 && model_.is_stale(slots_[i], clocks_[i], staleness_);
      CHECK(chosen_[i] == is_stale);
      expected_stale += is_stale;
      if (slots_[i] < 0 || is_stale || staleness_ == kUnbounded) continue;
      const int64_t lag = clocks_[i] - model_.clock(slots_[i]);
      ++expected.bins[lag <= 0 ? 0 : 1 + static_cast<int>(std::log2(lag))];
    }
    CHECK(num_stale == expected_stale);
    CHECK(std::equal(lags.bins, lags.bins + LagHistogram::kBins, expected.bins));
  }

  void insert() {
    for (int64_t i = 0; i < n_; ++i) chosen_[i] = !once_in(random_, 6);
    const Ints before = slots_;
    ReleasedSums out;
    const int64_t num_evicted = cache_.insert_and_evict(keys_.data(), chosen_.data(), weights_.data(), states_.data(),
                                                        clocks_.data(), n_, slots_.data(), &out);
    std::vector<Push> expected;
    int64_t expected_evicted = 0;
    for (int64_t i = 0; i < n_; ++i) {
      if (before[i] >= 0 || !chosen_[i]) {
        CHECK(slots_[i] == before[i]);
        continue;
      }
      expected_evicted += slots_[i] >= 0 && model_.is_taken(slots_[i]);
      expect(model_.insert(keys_[i], slots_[i], row(weights_, i), state(i), clocks_[i]), &expected);
    }
    CHECK(num_evicted == expected_evicted);
    for (int64_t i = 0; i < n_; ++i) CHECK(slots_[i] == model_.look_up(keys_[i]));
    compare(out, expected);
    CHECK(cache_.num_rows() == model_.num_rows() && cache_.num_rows() <= cache_.capacity_rows());
  }

  void read() {
    constexpr float kUntouched = 12345.5f;
    Floats rows(n_ * kDim, kUntouched);
    cache_.gather(slots_.data(), n_, rows.data());
    for (int64_t i = 0; i < n_; ++i)
      CHECK(row(rows, i) == (slots_[i] < 0 ? Floats(kDim, kUntouched) : model_.weight(slots_[i])));
  }

  void update() {
    const double lr = rule_ == "sgd" ? 1 : 1.0 / static_cast<double>(step_);
    cache_.set_step(lr, step_);
    model_.set_step(lr, step_);
    const Floats grads = integers(random_, n_ * kDim, -3, 3);
    cache_.update(slots_.data(), grads.data(), n_, anticipate_);
    ReleasedSums out;
    cache_.release_directly(keys_.data(), slots_.data(), clocks_.data(), grads.data(), n_, &out);
    std::vector<Push> expected;
    for (int64_t i = 0; i < n_; ++i) {
      const Floats grad = row(grads, i);
      Floats& sum = outstanding_.try_emplace(keys_[i], kDim, 0.0f).first->second;
      for (int64_t d = 0; d < kDim; ++d) sum[d] += grad[d];
      if (slots_[i] < 0)
        expected.push_back({keys_[i], clocks_[i] + 1, 1, step_, step_, model_.pushed({grad})});
      else
        model_.update(slots_[i], grad);
    }
    compare(out, expected);
    take_due();
    read();
  }

  void take_due() {
    ReleasedSums out;
    cache_.release_due(slots_.data(), n_, staleness_, &out);
    std::vector<Push> expected;
    for (const int64_t slot : slots_)
      if (slot >= 0 && model_.is_due(slot, staleness_)) expect(model_.take(slot), &expected);
    compare(out, expected);
  }

  void take_all() {
    ReleasedSums out;
    cache_.release_all(&out);
    std::vector<Push> expected;
    for (int64_t slot = 0; slot < model_.num_slots(); ++slot) expect(model_.take(slot), &expected);
    compare(out, expected);
  }

  static void expect(std::optional<Push> push, std::vector<Push>* expected) {
    if (push) expected->push_back(std::move(*push));
  }

  void compare(const ReleasedSums& out, const std::vector<Push>& expected) {
    const std::vector<Push> pushes = listed(out, cache_.sum_dim());
    CHECK(pushes == expected);
    CHECK(cache_.num_pending() == model_.num_pending());
    for (const Push& push : pushes)
      for (int64_t d = 0; d < kDim; ++d) outstanding_.at(push.key)[d] -= push.sums[d];
  }

  Random random_;
  std::string rule_;
  int64_t num_keys_;
  float anticipate_;
  RowOptimizer optimizer_;
  RowCache cache_;
  ModelCache model_;
  std::unordered_map<int64_t, Floats> outstanding_;  // gradients passed in and not yet returned, by key

  int64_t step_ = 0, staleness_ = 0, n_ = 0;
  Ints keys_, slots_;            // (n)
  Floats weights_, states_;      // (n, dim), (n, preview_dim)
  Clocks clocks_;                // (n)
  std::vector<uint8_t> chosen_;  // (n)
};

void cache_equals_its_model(uint64_t seed) {
  for (const Policy policy : {Policy::kLru, Policy::kLfu, Policy::kLfuOpt})
    for (const int64_t capacity : {0, 1, 5, 32, 64, 320})
      for (const char* rule : kRules) {
        current_case = std::string("RowCache of ") + std::to_string(capacity) + " rows, " + rule + ", policy " +
                       std::to_string(static_cast<int>(policy)) + ", seed " + std::to_string(++seed);
        CacheTrial(capacity, rule, policy, seed).run(120);
      }
}

// A line's row in 32 or 16 bits, its state and its pending sum.
struct LineOf {
  Floats sums, row;
  std::vector<uint16_t> half_row;
  float state;

  bool operator==(const LineOf& other) const {
    return same(sums, other.sums) && same(row, other.row) && half_row == other.half_row && state == other.state;
  }
  static bool same(const Floats& a, const Floats& b) {  // bit for bit, -0.0 and NaN as well
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }
};

// Updates with gradients of all signs, some 0 and -0: in passes over the row, then in two.
template <typename RowOf>
void check_updates(Random& random, const RowOptimizer& optimizer, LineOf plain, RowOf row_of) {
  std::normal_distribution<float> normal;
  LineOf fused = plain;
  const int64_t dim = optimizer.dim();
  for (int32_t count = 0; count < 4; ++count) {
    Floats grad(dim);
    for (float& value : grad) value = once_in(random, 8) ? -0.0f : normal(random);
    optimizer.add_and_preview(plain.sums.data(), count, row_of(plain), &plain.state, grad.data(), 3, count + 1,
                              Serially());
    const auto row = row_of(plain);
    const float square = Serially().sum(dim, [=](int64_t d) { return row[d] * row[d]; }) / static_cast<float>(dim);
    const float step_square = optimizer.step_square(&plain.state, grad.data(), count + 1, Serially());
    const Moved moved =
        optimizer.update(fused.sums.data(), count, row_of(fused), &fused.state, grad.data(), 3, count + 1, true);
    CHECK(fused == plain);
    CHECK(moved.row_square == square && moved.step_square == step_square);
  }
}

void an_update_in_two_passes_has_the_bits_of_its_parts(uint64_t seed) {
  Random random(seed);
  std::normal_distribution<float> normal;
  for (const char* rule : kRules)
    for (const int64_t dim : {1, 31, 32, 33, 128})
      for (const float decay : {0.0f, 0.1f}) {
        current_case = std::string(rule) + ", dim " + std::to_string(dim) + ", decay " + std::to_string(decay);
        RowOptimizer optimizer(rule, dim, decay, 0.9f, 0.99f, 1e-8f);
        optimizer.set_step(0.05, 3);
        LineOf line{Floats(optimizer.sum_dim(), 5.0f), Floats(dim), std::vector<uint16_t>(dim), 0.5f};
        for (float& value : line.row) value = once_in(random, 8) ? -0.0f : normal(random);
        for (int64_t d = 0; d < dim; ++d) line.half_row[d] = narrowed(line.row[d], RowType::kBfloat16, kNearest);
        check_updates(random, optimizer, line, [](LineOf& of) { return of.row.data(); });
        check_updates(random, optimizer, line,
                      [](LineOf& of) { return HalfRow(of.half_row.data(), RowType::kBfloat16, 7); });
      }
}

void cache_rounds_its_capacity_down_to_whole_sets(uint64_t) {
  for (const auto& [asked, given] : std::map<int64_t, int64_t>{{0, 0}, {1, 1}, {31, 31}, {32, 32}, {63, 32}, {100, 96}})
    CHECK(RowCache(asked, optimizer_of("sgd"), Policy::kLru).capacity_rows() == given);
  CHECK(throws<std::invalid_argument>([] { RowCache(-1, optimizer_of("sgd"), Policy::kLru); }));
  CHECK(throws<std::invalid_argument>([] { RowCache(int64_t{1} << 31, optimizer_of("sgd"), Policy::kLru); }));
}

// One line of 4 KiB whose sum is pushed each time: if its memory were not reused, it would run out soon.
void cache_uses_the_room_of_sums_handed_out_again(uint64_t) {
  constexpr int64_t dim = 1024;
  RowCache cache(1, RowOptimizer("sgd", dim, 0, 0, 0, 0), Policy::kLru);
  const int64_t key = 7;
  const uint8_t chosen = 1;
  const int32_t clock = 0;
  const Floats row(dim, 1.0f);
  int64_t slot = -1;
  cache.look_up(&key, 1, &slot);
  cache.use(&slot, 1, 1);
  ReleasedSums evicted;
  cache.insert_and_evict(&key, &chosen, row.data(), nullptr, &clock, 1, &slot, &evicted);
  for (int32_t i = 1; i <= 2000; ++i) {
    ReleasedSums out;
    cache.update(&slot, row.data(), 1, 1);
    cache.release_all(&out);
    CHECK(out.clocks == Clocks{i} && out.counts == Clocks{1});
    CHECK(std::equal(row.begin(), row.end(), out.sums.begin(), out.sums.end()));
  }
}

// A gradient that nearly cancels the weight decay leaves squares of about 0, of either sign after rounding.
void clocks_are_told_of_lines_that_are_young(uint64_t) {
  RowCache cache(kWays, optimizer_of("sgd"), Policy::kLru);
  const Ints keys{1, 2};
  Ints slots(3, -1);
  const Floats rows(2 * kDim), grad(kDim, 1);
  const Clocks clocks{10, 20};
  const std::vector<uint8_t> all(2, 1);
  ReleasedSums out;
  cache.use(slots.data(), 0, 0);
  cache.insert_and_evict(keys.data(), all.data(), rows.data(), nullptr, clocks.data(), 2, slots.data(), &out);
  for (int i = 0; i < 2; ++i) cache.update(&slots[0], grad.data(), 1, 1);  // one line is 2 updates old, the other 0
  Clocks told(3);
  const auto tell = [&](bool will_write, int64_t staleness) {
    cache.clocks_within(slots.data(), 3, will_write, staleness, told.data());
    return told;
  };
  CHECK((tell(false, 1) == Clocks{kNoLine, 20, kNoLine}) && (tell(false, 2) == Clocks{12, 20, kNoLine}));
  CHECK((tell(true, 2) == Clocks{kNoLine, 20, kNoLine}) && (tell(true, kUnbounded) == Clocks{12, 20, kNoLine}));
  cache.use(&slots[1], 1, 1);  // now only the second line is written
  CHECK((tell(true, 2) == Clocks{12, 20, kNoLine}) && (tell(true, 0) == Clocks{kNoLine, kNoLine, kNoLine}));
}

void numbers_of_16_bits_are_rounded_right(uint64_t) {
  for (const RowType type : {RowType::kFloat16, RowType::kBfloat16}) {
    const uint32_t infinite = type == RowType::kFloat16 ? 0x7c00 : 0x7f80;
    for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
      const float value = widened(static_cast<uint16_t>(bits), type);
      CHECK(((bits & 0x7fff) > infinite) == std::isnan(value) && ((bits & 0x7fff) == infinite) == std::isinf(value));
      for (const uint32_t random : {0u, kNearest, 0xffffu}) {
        const uint16_t again = narrowed(value, type, random);
        CHECK(again == bits || (std::isnan(value) && std::isnan(widened(again, type))));
      }
    }
    const float largest = widened(static_cast<uint16_t>(infinite - 1), type);
    CHECK(widened(narrowed(std::numeric_limits<float>::max(), type, 0xffff), type) == largest);
    for (const float value : {1.0f / 3, -0.1f, 1e-5f, 3.3e-8f, -7.77e-3f, 1234.567f}) {
      double mean = 0, nearest = widened(narrowed(value, type, kNearest), type), low = 1e9, high = -1e9;
      for (uint32_t random = 0; random < 1 << 16; ++random) {
        const double rounded = widened(narrowed(value, type, random), type);
        mean += rounded / (1 << 16);
        low = std::min(low, rounded);
        high = std::max(high, rounded);
      }
      CHECK(low < value && value < high && std::abs(mean - value) <= (high - low) * 0x1p-10);
      CHECK(std::abs(nearest - value) <= 0.5 * (high - low));
    }
  }
}

void rows_are_added_in_order(uint64_t seed) {
  Random random(seed);
  for (const int64_t n : {0, 1, 7, 8, 9, 300}) {
    const int64_t num_rows = pick_in(random, 1, 40);
    Ints rows(n);
    for (int64_t& row : rows) row = pick(random, num_rows);
    const Floats values = integers(random, n * kDim, -9, 9);
    Floats sums(num_rows * kDim, -1), of_parts(num_rows * kDim, -1), expected(num_rows * kDim);
    for (int64_t i = 0; i < n * kDim; ++i) expected[rows[i / kDim] * kDim + i % kDim] += values[i];
    sum_by_row(values.data(), 1, n, 0, rows.data(), num_rows, kDim, sums.data());
    CHECK(sums == expected);
    Floats spread(n * (kDim + 5));
    for (int64_t i = 0; i < n * kDim; ++i) spread[i / kDim * (kDim + 5) + i % kDim] = values[i];
    sum_by_row(spread.data(), n, 1, kDim + 5, rows.data(), num_rows, kDim, of_parts.data());
    CHECK(of_parts == expected);
    if (n % 2 != 0) continue;
    const int64_t half = n / 2 * kDim;
    Floats halves(values.begin(), values.begin() + half);
    halves.insert(halves.end(), 7, 1.0f);
    halves.insert(halves.end(), values.begin() + half, values.end());
    sum_by_row(halves.data(), 2, n / 2, half + 7, rows.data(), num_rows, kDim, of_parts.data());
    CHECK(of_parts == expected);
  }
}

void sums_of_frequent_rows_have_runs(uint64_t seed) {
  Random random(seed);
  for (const int64_t n : {kRun, kRun + 1, 2 * kRun, 2 * kRun + 1, 20 * kRun + 7}) {
    const Ints rows(n, 0);
    Floats values(n);
    for (float& value : values) value = static_cast<float>(pick(random, 1 << 20)) / 3;
    float expected = 0, sum = -1;
    for (int64_t begin = 0; begin < n; begin += kRun) {
      float of_run = 0;
      for (int64_t i = begin; i < std::min(begin + kRun, n); ++i) of_run += values[i];
      expected += of_run;
    }
    sum_by_row(values.data(), 1, n, 0, rows.data(), 1, 1, &sum);
    CHECK(sum == expected);
  }
}

void sums_of_squares_are_never_negative(uint64_t seed) {
  Random random(seed);
  for (const char* rule : {"adagrad", "rowwise_adagrad", "adam", "ftrl"}) {
    RowOptimizer optimizer(rule, 1, 0.1f, 0.9f, 0.999f, 1e-8f);
    optimizer.set_step(1, 1);
    for (int i = 0; i < 20000; ++i) {
      float weight = static_cast<float>(pick_in(random, 1, 1000)) / 7;
      const float grad = -0.1f * weight * (1 + static_cast<float>(pick_in(random, -100, 100)) * 1e-6f);
      float square, mean_square = 0;
      optimizer.square(&square, &grad, Serially());
      optimizer.preview(&weight, &mean_square, optimizer.summed(&grad, &square, 1));
      CHECK(std::isfinite(weight));
    }
  }
}

// Rings.

// Consecutive empty rings, as in an owner's memory.
class Rings {
 public:
  Rings(int64_t num_origins, uint64_t capacity, RecordFormat format)
      : num_origins_(num_origins), stride_(sizeof(RingHeader) + capacity), format_(format) {
    const uint64_t bytes = num_origins * stride_;
    memory_.reset(static_cast<uint8_t*>(std::aligned_alloc(alignof(RingHeader), bytes)));
    std::memset(memory_.get(), 0, bytes);
    for (int64_t origin = 0; origin < num_origins; ++origin) new (ring(origin)) RingHeader{};
  }

  uint8_t* ring(int64_t origin) { return memory_.get() + origin * stride_; }
  uint64_t tail(int64_t origin) { return reinterpret_cast<RingHeader*>(ring(origin))->tail.load(); }
  uint64_t capacity() const { return stride_ - sizeof(RingHeader); }
  RecordFormat format() const { return format_; }
  RingProducer producer(int64_t origin) { return {ring(origin), capacity(), format_}; }
  std::vector<RingConsumer> ends() { return consumers(memory_.get(), stride_, num_origins_, format_); }

 private:
  struct Free {
    void operator()(uint8_t* memory) const { std::free(memory); }
  };

  int64_t num_origins_;
  uint64_t stride_;
  RecordFormat format_;
  std::unique_ptr<uint8_t[], Free> memory_;
};

// Rows for one owner, with all columns of a record.
struct Batch {
  Ints keys, order;       // (n); clock, count, steps and values of keys[i] stand at order[i]
  Clocks clocks, counts;  // (n)
  Clocks steps;           // (n, 2)
  Floats values;          // (n, width)

  Batch(Random& random, int64_t n, int64_t width)
      : keys(n), order(permutation(random, n)), clocks(n), counts(n, 1), steps(2 * n), values(n * width) {}

  int64_t size() const { return static_cast<int64_t>(keys.size()); }
  PushColumns from(int64_t begin) const {
    return {keys.data() + begin, clocks.data(), counts.data(), steps.data(), values.data()};
  }
};

// Sends batches through a ring.
class Origin {
 public:
  Origin(Rings& rings, int64_t origin) : capacity_(rings.capacity()), producer_(rings.producer(origin)) {}

  // Writes one record of the rows from `begin` on; returns the rows sent, or -1 for no room.
  int64_t send_some(int64_t step, const Batch& batch, int64_t begin) {
    const int64_t sent =
        producer_.write(step, batch.from(begin), batch.order.data() + begin, batch.size() - begin, true);
    CHECK(producer_.head() - producer_.tail() <= capacity_);
    return sent;
  }

  // Sends as many of the rows from *begin on as fit; true when all of the batch, and "last", is sent.
  bool send_fitting(int64_t step, const Batch& batch, int64_t* begin) {
    while (true) {
      const int64_t sent = send_some(step, batch, *begin);
      if (sent < 0) return false;
      *begin += sent;
      if (*begin == batch.size() && (sent > 0 || batch.size() == 0)) return true;
    }
  }

  // Sends it all; calls when_full() whenever there is no room.
  template <typename WhenFull>
  void send(int64_t step, const Batch& batch, WhenFull when_full) {
    int64_t begin = 0;
    await([&] {
      const bool is_done = send_fitting(step, batch, &begin);
      if (!is_done) when_full();
      return is_done;
    });
  }

  void send(int64_t step, const Batch& batch) {
    send(step, batch, [] {});
  }

  bool is_drained() const { return producer_.is_drained(); }
  uint64_t head() const { return producer_.head(); }

 private:
  uint64_t capacity_;
  RingProducer producer_;
};

// Messages with consecutively numbered rows: row q, its clock, count and values are functions of q.
struct NumberedStream {
  Ints ends;  // first number after each message
  RecordFormat format;

  NumberedStream(Random& random, int64_t num_messages, RecordFormat format) : format(format) {
    int64_t end = 0;
    for (int64_t m = 0; m < num_messages; ++m) ends.push_back(end += once_in(random, 5) ? 0 : pick(random, 30));
  }

  Batch message(Random& random, int64_t m) const {
    const int64_t begin = m == 0 ? 0 : ends[m - 1];
    Batch batch(random, ends[m] - begin, format.width);
    for (int64_t i = 0; i < batch.size(); ++i) {
      const int64_t q = begin + i, j = batch.order[i];
      batch.keys[i] = q, batch.clocks[j] = clock(q), batch.counts[j] = count(q);
      batch.steps[2 * j] = first(q), batch.steps[2 * j + 1] = last(q);
      for (int64_t d = 0; d < format.width; ++d) batch.values[j * format.width + d] = value(q, d);
    }
    return batch;
  }

  // Whether the record contains whole rows of message m from number q on.
  void check(const Record& record, int64_t m, int64_t q) const {
    const auto& [keys, clocks, counts, steps, grads, squares] = record.columns;
    const float* next_square = squares;
    const int64_t n = record.header->num_rows;
    CHECK(record.header->step == m && n >= 0 && q + n <= ends[m]);
    CHECK(record.header->is_last == (q + n == ends[m]));
    for (int64_t i = 0; i < n; ++i) {
      CHECK(keys[i] == q + i);
      if (format.has_clocks) CHECK(clocks[i] == clock(q + i) && counts[i] == count(q + i));
      if (format.has_steps) CHECK(steps[2 * i] == first(q + i) && steps[2 * i + 1] == last(q + i));
      for (int64_t d = 0; d < format.dim(); ++d) CHECK(grads[i * format.dim() + d] == value(q + i, d));
      if (!format.has_squares(count(q + i))) continue;
      for (int64_t d = 0; d < format.square_dim; ++d) CHECK(*next_square++ == value(q + i, format.dim() + d));
    }
  }

  static int32_t clock(int64_t q) { return static_cast<int32_t>(3 * q + 1); }
  static int32_t count(int64_t q) { return static_cast<int32_t>(q % 7 + 1); }
  static int32_t first(int64_t q) { return static_cast<int32_t>(5 * q); }
  static int32_t last(int64_t q) { return static_cast<int32_t>(5 * q + 4); }
  float value(int64_t q, int64_t d) const { return static_cast<float>(q * format.width + d); }
};

// Reads the whole stream from a ring; sometimes it keeps a record for a while, which must not change.
void consume(RingConsumer ring, const Rings& rings, const NumberedStream& stream, Random random) {
  int64_t q = 0;
  uint64_t offset = 0;
  for (int64_t m = 0; m < static_cast<int64_t>(stream.ends.size());) {
    Record record;
    await([&] { return ring.peek(&record); });
    stream.check(record, m, q);
    const uint64_t bytes = record.header->bytes;
    CHECK(bytes > 0 && bytes % kRecordAlign == 0 && offset + bytes <= rings.capacity());
    const bool only_fills = record.header->num_rows == 0 && !record.header->is_last;
    CHECK(!only_fills || offset + bytes == rings.capacity());
    if (once_in(random, 8)) {
      for (int i = 0; i < 20; ++i) sched_yield();
      stream.check(record, m, q);
    }
    q += record.header->num_rows;
    m += record.header->is_last;
    offset = (offset + bytes) % rings.capacity();
    ring.release(record);
  }
  Record record;
  CHECK(!ring.peek(&record));
}

void rows_pass_a_ring_in_order_and_once(uint64_t seed) {
  for (const RecordFormat format :
       {RecordFormat{3, false}, RecordFormat{5, true}, RecordFormat{6, true, true, 3}, RecordFormat{40, true, true, 1}})
    for (const uint64_t more : {0, 64, 1024}) {
      Rings rings(1, min_ring_capacity(format) + more, format);
      current_case = "a ring of " + std::to_string(rings.capacity()) + " bytes, rows of " +
                     std::to_string(format.row_bytes()) + ", seed " + std::to_string(++seed);
      Random random(seed);
      const NumberedStream stream(random, 150, format);
      std::thread consumer(consume, rings.ends()[0], std::cref(rings), std::cref(stream), Random(seed));
      Origin origin(rings, 0);
      for (size_t m = 0; m < stream.ends.size(); ++m) origin.send(m, stream.message(random, m));
      consumer.join();
      CHECK(origin.is_drained());
    }
}

void ring_refuses_capacities_too_small_or_not_aligned(uint64_t) {
  const RecordFormat format{4, true};
  const uint64_t least = min_ring_capacity(format);
  alignas(64) static uint8_t memory[4096];
  for (const uint64_t capacity : {uint64_t{0}, least - kRecordAlign, least + 1}) {
    CHECK(throws<std::invalid_argument>([&] { RingProducer(memory, capacity, format); }));
    CHECK(throws<std::invalid_argument>([&] { RingConsumer(memory, capacity, format); }));
  }
}

void full_ring_takes_nothing_until_the_tail_moves(uint64_t seed) {
  Random random(seed);
  const RecordFormat format{4, true};
  Rings rings(1, min_ring_capacity(format), format);
  Origin origin(rings, 0);
  const Batch batch(random, 10, 4);
  int64_t begin = 0;
  CHECK(!origin.send_fitting(0, batch, &begin) && begin > 0 && begin < 10);
  const uint64_t head = origin.head();
  CHECK(origin.send_some(0, batch, begin) == -1 && origin.head() == head);
  Record record;
  RingConsumer end = rings.ends()[0];
  CHECK(end.peek(&record));
  end.release(record);
  CHECK(origin.send_some(0, batch, begin) >= 0 && origin.head() > head);
}

// Two batches, each for one owner, as one.
Batch joined(Random& random, const Batch& a, const Batch& b, int64_t width) {
  Batch both(random, 0, width);
  const auto append = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  for (const Batch* batch : {&a, &b}) {
    const int64_t num_before = both.size();
    for (const int64_t position : batch->order) both.order.push_back(num_before + position);
    append(both.keys, batch->keys), append(both.values, batch->values), append(both.steps, batch->steps);
    append(both.clocks, batch->clocks), append(both.counts, batch->counts);
  }
  return both;
}

void a_push_reaches_every_owner_once(uint64_t seed) {
  constexpr int64_t kMessages = 80;
  Random random(seed);
  const RecordFormat format{5, true};
  Rings rings(2, min_ring_capacity(format) + 64, format);
  const std::vector<NumberedStream> streams{{random, kMessages, format}, {random, kMessages, format}};
  std::vector<std::thread> owners;
  for (int o : {0, 1})
    owners.emplace_back(consume, rings.ends()[o], std::cref(rings), std::cref(streams[o]), Random(seed + o));
  RingProducer first_ring = rings.producer(0), second_ring = rings.producer(1);
  const std::vector<RingProducer*> ends{nullptr, &first_ring, &second_ring};  // to ranks 0, the origin, 1 and 2
  for (int64_t m = 0; m < kMessages; ++m) {
    const Batch a = streams[0].message(random, m), b = streams[1].message(random, m);
    const Batch both = joined(random, a, b, format.width);
    const Ints first{0, 0, a.size(), both.size()};
    RingWriter writer(ends, {m, {both.order.data(), both.keys.data(), first.data()}, both.from(0), true});
    await([&] {
      const bool is_done = writer.proceed();
      CHECK(is_done == writer.full().empty());
      return is_done;
    });
  }
  for (auto& owner : owners) owner.join();
  const Ints none{0, 0, 0, 0};
  const uint64_t head = first_ring.head();
  CHECK(RingWriter(ends, {kMessages, {nullptr, nullptr, none.data()}, {}, false}).proceed());
  CHECK(first_ring.head() == head);
}

// The push applier.

// A shard of rows that start at 0, under sgd at learning rate 1: a row is minus the sum of its pushes.
struct OwnedRows {
  int64_t num_rows;
  Floats weight;
  Clocks clock;
  std::vector<uint8_t> touched;
  std::shared_ptr<const Directory> directory;  // key k is at row k

  explicit OwnedRows(int64_t num_rows)
      : num_rows(num_rows),
        weight(num_rows * kDim, 0.0f),
        clock(num_rows, 0),
        touched(num_rows, 0),
        directory(std::make_shared<Directory>(Partition("range", num_rows, 1), 0)) {}

  Shard shard() {
    return {weight.data(), nullptr, clock.data(), touched.data(), num_rows, kDim, 0, nullptr, directory.get()};
  }
  bool row_is(int64_t row, float multiple) const {
    for (int64_t d = 0; d < kDim; ++d)
      if (weight[row * kDim + d] != multiple * static_cast<float>(d + 1)) return false;
    return true;
  }
};

// All pushes of one sender: for each row the sum and the highest clock. Every value is a multiple of (1, 2, .., dim).
struct Tally {
  Floats sums;
  Clocks clocks;

  explicit Tally(int64_t num_rows) : sums(num_rows, 0.0f), clocks(num_rows, 0) {}

  void add(const Tally& other) {
    for (size_t row = 0; row < sums.size(); ++row) {
      sums[row] += other.sums[row];
      clocks[row] = std::max(clocks[row], other.clocks[row]);
    }
  }

  Batch draw(Random& random, int64_t n, int64_t first_row, int64_t num_rows) {
    Batch batch(random, n, kDim);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t row = pick_in(random, first_row, first_row + num_rows - 1), j = batch.order[i];
      const float multiple = static_cast<float>(pick_in(random, -8, 8));
      batch.keys[i] = row, batch.clocks[j] = static_cast<int32_t>(pick(random, 10000));
      for (int64_t d = 0; d < kDim; ++d) batch.values[j * kDim + d] = multiple * static_cast<float>(d + 1);
      sums[row] += multiple;
      clocks[row] = std::max(clocks[row], batch.clocks[j]);
    }
    return batch;
  }

  void check(const OwnedRows& rows) const {
    for (int64_t row = 0; row < rows.num_rows; ++row) CHECK(rows.row_is(row, -sums[row]));
    CHECK(rows.clock == clocks);
  }
};

constexpr RecordFormat kSums{kDim, true};
constexpr int64_t kShared = 48;  // rows that every origin sends to

Ints first_numbers(int64_t n) {
  Ints numbers(n);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

// A push applier with its shard and rings: kShared rows, then a separate one for each origin. By default it drains all
// rings.
struct Owner {
  explicit Owner(int64_t num_origins, uint64_t more_bytes = 1024)
      : Owner(num_origins, more_bytes, first_numbers(num_origins)) {}

  Owner(int64_t num_origins, uint64_t more_bytes, const Ints& watched)
      : rings(num_origins, min_ring_capacity(kSums) + more_bytes, kSums),
        rows(kShared + num_origins),
        applier(std::make_unique<PushApplier>(rings.ends(), rows.shard(), optimizer_of("sgd"))) {
    const double lr = 1;
    applier->set_step(&lr, 1, 1);
    applier->watch(watched);
    thread.add(applier.get());
  }

  void apply(const Batch& batch) { applier->apply(batch.from(0), batch.order.data(), batch.size()); }

  void check(const Tally& tally) {
    applier->exclusively([&] { tally.check(rows); });
  }

  Rings rings;
  OwnedRows rows;
  std::unique_ptr<PushApplier> applier;
  ApplierThread thread;  // last: it uses all above
};

// An origin on its own thread.
class Sender {
 public:
  using Work = std::function<void(Sender&)>;

  Sender(Owner& owner, int64_t number, uint64_t seed, Work work)
      : owner(owner),
        number(number),
        random(seed),
        origin(owner.rings, number),
        tally(owner.rows.num_rows),
        thread_([this, work] {
          work(*this);
          is_done = true;
        }) {}

  void send_to_shared_rows() {
    const Batch batch = tally.draw(random, pick_in(random, 1, 20), 0, kShared);
    origin.send(0, batch, [this] { is_full = true; });
  }

  int64_t own_row() const { return kShared + number; }
  void send_to_own_row() { origin.send(0, tally.draw(random, 1, own_row(), 1)); }
  bool own_row_is_applied() const {
    return owner.rows.row_is(own_row(), -tally.sums[own_row()]) &&
           load_clock(&owner.rows.clock[own_row()]) == tally.clocks[own_row()];
  }

  const Tally& join() {
    if (thread_.joinable()) thread_.join();
    return tally;
  }

  Owner& owner;
  const int64_t number;
  Random random;
  Origin origin;
  Tally tally;
  std::atomic<bool> is_full{false}, is_done{false};

 private:
  std::thread thread_;  // last: it uses all above
};

using Senders = std::vector<std::unique_ptr<Sender>>;

Senders start(Owner& owner, int64_t num_origins, uint64_t seed, const Sender::Work& work) {
  Senders senders;
  for (int64_t number = 0; number < num_origins; ++number)
    senders.push_back(std::make_unique<Sender>(owner, number, seed + number, work));
  return senders;
}

bool are_done(const Senders& senders) {
  return std::all_of(senders.begin(), senders.end(), [](const auto& sender) { return sender->is_done.load(); });
}

// Waits until all pushes are applied, and compares.
void finish(Owner& owner, const Senders& senders, Tally tally) {
  for (const auto& sender : senders) {
    tally.add(sender->join());
    await([&] { return sender->origin.is_drained(); });
  }
  CHECK(owner.applier->drain() == 0);
  owner.check(tally);
}

void every_sum_is_applied_once(uint64_t seed) {
  Owner owner(3);
  Random random(seed);
  Tally own(owner.rows.num_rows);
  const Senders senders = start(owner, 3, seed, [](Sender& sender) {
    for (int i = 0; i < 2500; ++i) sender.send_to_shared_rows();
  });
  while (!are_done(senders)) {
    owner.apply(own.draw(random, 10, 0, kShared));
    CHECK(owner.applier->drain() >= 0);
    const double lr = 1;
    owner.applier->set_step(&lr, 1, pick_in(random, 1, 9));
    owner.applier->exclusively([&] {  // no row is half written
      for (int64_t row = 0; row < kShared; ++row) CHECK(owner.rows.row_is(row, owner.rows.weight[row * kDim]));
    });
    sched_yield();
  }
  finish(owner, senders, own);
}

// Reads without the lock: no other thread writes an origin's own row, and the tail must have published it.
void a_drained_ring_means_applied_sums(uint64_t seed) {
  Owner owner(3);
  const Senders senders = start(owner, 3, seed, [](Sender& sender) {
    for (int i = 0; i < 100; ++i) {
      sender.send_to_shared_rows();
      sender.send_to_own_row();
      await([&] { return sender.origin.is_drained(); });
      CHECK(sender.own_row_is_applied());
      sender.owner.applier->exclusively([&] { CHECK(sender.own_row_is_applied()); });
    }
  });
  while (!are_done(senders)) {
    owner.applier->drain();
    sched_yield();
  }
  finish(owner, senders, Tally(owner.rows.num_rows));
}

void who_sees_a_clock_sees_its_row(uint64_t seed) {
  Owner owner(2);
  const Senders senders = start(owner, 2, seed, [](Sender& sender) {
    const int64_t row = sender.own_row();
    for (int32_t clock = 1; clock <= 100; ++clock) {
      Batch batch(sender.random, 1, kDim);
      batch.keys[0] = row, batch.clocks[0] = sender.tally.clocks[row] = clock;
      for (int64_t d = 0; d < kDim; ++d) batch.values[d] = static_cast<float>(d + 1);
      sender.tally.sums[row] += 1;
      sender.origin.send(0, batch);
      await([&] { return load_clock(&sender.owner.rows.clock[row]) == clock; });
      CHECK(sender.own_row_is_applied());
    }
  });
  finish(owner, senders, Tally(owner.rows.num_rows));
}

void a_stalled_owner_loses_nothing(uint64_t seed) {
  Owner owner(3, 0);
  Senders senders;
  owner.applier->exclusively([&] {
    senders = start(owner, 3, seed, [](Sender& sender) {
      for (int i = 0; i < 200; ++i) sender.send_to_shared_rows();
    });
    for (const auto& sender : senders) await([&] { return sender->is_full.load(); });
    for (int64_t number = 0; number < 3; ++number) CHECK(owner.rings.tail(number) == 0);
    Tally(owner.rows.num_rows).check(owner.rows);
  });
  finish(owner, senders, Tally(owner.rows.num_rows));
}

Batch one_row(Random& random, int64_t row) {
  Batch batch(random, 1, kDim);
  batch.keys[0] = row, batch.clocks[0] = 1;
  for (int64_t d = 0; d < kDim; ++d) batch.values[d] = static_cast<float>(d + 1);
  return batch;
}

Batch two_rows(Random& random, int64_t row, int64_t other_row) {
  Batch batch(random, 2, kDim);
  batch.keys = {row, other_row};
  for (int64_t i = 0; i < 2 * kDim; ++i) batch.values[i] = static_cast<float>(i % kDim + 1);
  return batch;
}

// One origin sends row 0, then row 1 with an invalid row; then both origins send row 2.
void check_an_error(int64_t wrong_origin, int64_t wrong_row, Random& random) {
  Owner owner(2);
  Origin wrong(owner.rings, wrong_origin), other(owner.rings, 1 - wrong_origin);
  wrong.send(0, one_row(random, 0));
  await([&] { return wrong.is_drained(); });
  const uint64_t tail = wrong.head();
  wrong.send(0, two_rows(random, 1, wrong_row));
  await([&] { return throws<std::out_of_range>([&] { owner.applier->drain(); }); });
  wrong.send(0, one_row(random, 2));
  other.send(0, one_row(random, 2));
  sleep(std::chrono::milliseconds(5));
  for (int i = 0; i < 2; ++i) CHECK(throws<std::out_of_range>([&] { owner.applier->drain(); }));
  CHECK(throws<std::out_of_range>([&] { owner.apply(one_row(random, 2)); }));
  owner.applier->exclusively([&] {
    CHECK(owner.rings.tail(wrong_origin) == tail && owner.rings.tail(1 - wrong_origin) == 0);
    CHECK(owner.rows.row_is(0, -1) && owner.rows.row_is(1, 0) && owner.rows.row_is(2, 0));
  });
  const auto began = std::chrono::steady_clock::now();
  owner.thread.remove(owner.applier.get());
  CHECK(std::chrono::steady_clock::now() - began < Seconds(5));
}

void an_error_is_kept_and_nothing_more_is_drained(uint64_t seed) {
  Random random(seed);
  for (const int64_t wrong_origin : {0, 1})
    for (const int64_t wrong_row : {int64_t{-1}, kShared + 2}) check_an_error(wrong_origin, wrong_row, random);
}

void a_wrong_row_of_its_own_is_refused_and_the_applier_goes_on(uint64_t seed) {
  Random random(seed);
  Owner owner(1);
  CHECK(throws<std::out_of_range>([&] { owner.apply(one_row(random, owner.rows.num_rows)); }));
  owner.apply(one_row(random, 3));
  Origin origin(owner.rings, 0);
  origin.send(0, one_row(random, 3));
  await([&] { return origin.is_drained(); });
  owner.applier->exclusively([&] { CHECK(owner.rows.row_is(3, -2)); });
}

void a_stopped_applier_leaves_the_rings_as_they_are(uint64_t seed) {
  Random random(seed);
  Owner owner(1);
  Origin origin(owner.rings, 0);
  owner.thread.remove(owner.applier.get());
  owner.thread.remove(owner.applier.get());
  origin.send(0, one_row(random, 7));
  sleep(std::chrono::milliseconds(5));
  CHECK(owner.rings.tail(0) == 0 && owner.rows.row_is(7, 0));
  CHECK(owner.applier->drain() == 1 && origin.is_drained() && owner.rows.row_is(7, -1));
}

void an_applier_drains_only_the_rings_of_its_origins(uint64_t seed) {
  Random random(seed);
  for (const Ints& watched : {Ints{}, Ints{1}}) {
    Owner owner(2, 1024, watched);
    Origin first(owner.rings, 0), second(owner.rings, 1);
    first.send(0, one_row(random, 5));
    second.send(0, one_row(random, 6));
    if (!watched.empty()) await([&] { return second.is_drained(); });
    sleep(std::chrono::milliseconds(5));
    CHECK(owner.applier->drain() == 0);
    CHECK(owner.rings.tail(0) == 0 && owner.rows.row_is(5, 0));
    CHECK(owner.rows.row_is(6, watched.empty() ? 0 : -1));
    owner.apply(one_row(random, 5));
    owner.applier->exclusively([&] { CHECK(owner.rows.row_is(5, -1)); });
  }
}

void one_thread_applies_for_all_tables(uint64_t seed) {
  Random random(seed);
  std::vector<std::unique_ptr<Owner>> owners;
  ApplierThread thread;
  for (int table = 0; table < 5; ++table) {
    owners.push_back(std::make_unique<Owner>(1));
    owners.back()->thread.remove(owners.back()->applier.get());
    thread.add(owners.back()->applier.get());
  }
  Origin wrong(owners[2]->rings, 0);
  wrong.send(0, one_row(random, owners[2]->rows.num_rows));  // an error of one table stops no other
  for (int step = 0; step < 20; ++step) {
    const int table = pick(random, 5);
    if (table == 2) continue;
    Origin origin(owners[table]->rings, 0);
    origin.send(step, one_row(random, 4));
    await([&] { return origin.is_drained(); });
  }
  CHECK(throws<std::out_of_range>([&] { owners[2]->applier->drain(); }));
  thread.remove(owners[3]->applier.get());
  Origin left(owners[3]->rings, 0);
  left.send(30, one_row(random, 4));
  sleep(std::chrono::milliseconds(5));
  CHECK(!left.is_drained());
  for (const auto& owner : owners) thread.remove(owner->applier.get());
}

void appliers_start_and_end_promptly(uint64_t seed) {
  Random random(seed);
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < 100; ++i) {
    Owner owner(1);
    if (once_in(random, 2)) owner.thread.remove(owner.applier.get());
  }
  CHECK(std::chrono::steady_clock::now() - began < Seconds(10));
}

// The step reducer.

constexpr int64_t kRanks = 4;

// One rank's gradients of a step: some distinct rows, with values whose sum depends on the order of addition.
Batch gradients(Random& random, int64_t num_rows) {
  Ints rows = permutation(random, num_rows);
  rows.resize(pick_in(random, 0, num_rows));
  Batch batch(random, static_cast<int64_t>(rows.size()), kDim);
  batch.keys = rows;
  for (float& value : batch.values)
    value = static_cast<float>(std::ldexp(static_cast<double>(pick_in(random, -1000, 1000)) / 7, pick(random, 25)));
  return batch;
}

// Gradients of some ranks for one row.
using OfRanks = std::map<int64_t, Floats>;

// The sum of the gradients of ranks [first, first + num) by its definition, empty without any.
Floats block_sum(const OfRanks& grads, int64_t first, int64_t num) {
  if (num == 1) return grads.count(first) ? grads.at(first) : Floats{};
  Floats left = block_sum(grads, first, num / 2), right = block_sum(grads, first + num / 2, num / 2);
  if (left.empty()) return right;
  for (size_t d = 0; d < right.size(); ++d) left[d] += right[d];
  return left;
}

// Numbers whose sums depend on their order.
Floats uneven(Random& random, int64_t n) {
  Floats values(n);
  for (float& value : values)
    value = std::ldexp(static_cast<float>(pick_in(random, -9999, 9999)), static_cast<int>(pick_in(random, -12, 12)));
  return values;
}

void rank_sums_have_the_bits_of_their_definition(uint64_t seed) {
  Random random(seed);
  RankSums sums;
  for (int trial = 0; trial < 2000; ++trial) {
    const int64_t num_ranks = pick_in(random, 1, 20), num_rows = pick_in(random, 1, 3);
    std::vector<OfRanks> rows(num_rows);
    sums.begin(kDim, num_ranks);
    std::map<int64_t, int64_t> numbers;  // row -> its number in sums
    for (int64_t rank = 0; rank < num_ranks; ++rank)
      for (int64_t row = 0; row < num_rows; ++row) {
        if (once_in(random, 2)) continue;
        const Floats& grad = rows[row][rank] = uneven(random, kDim);
        const int64_t number = numbers.try_emplace(row, sums.size()).first->second;
        sums.add(number, rank, grad.data(), once_in(random, 2));
      }
    for (const auto& [row, number] : numbers) {
      const float* found = sums.sum(number);
      CHECK(Floats(found, found + kDim) == block_sum(rows[row], 0, 32));
    }
  }
}

// Synchronous steps of all ranks, seen from the owner.
class ReducerTrial {
 public:
  ReducerTrial(int64_t own_rank, uint64_t seed)
      : random_(seed),
        own_rank_(own_rank),
        rings_(kRanks, min_ring_capacity(kGrads) + 256, kGrads),
        rows_(20),
        reducer_(rings_.ends(), own_rank, rows_.shard(), &applied_) {
    for (int64_t rank = 0; rank < kRanks; ++rank) origins_.emplace_back(rings_, rank);
  }

  void step(int64_t step) {
    std::vector<Batch> batches;
    for (int64_t rank = 0; rank < kRanks; ++rank) batches.push_back(gradients(random_, rows_.num_rows));
    begin(step, batches[own_rank_]);
    deliver(step, batches);
    CHECK(reducer_.poll() && reducer_.awaited() == kRanks);
    const std::map<int64_t, Floats> sums = summed(batches);
    for (const auto& [row, sum] : sums) {
      for (int64_t d = 0; d < kDim; ++d) expected_.weight[row * kDim + d] -= sum[d];
      ++expected_.clock[row];
    }
    CHECK(reducer_.apply(optimizer_of("sgd")) == static_cast<int64_t>(sums.size()));
    CHECK(rows_.weight == expected_.weight && rows_.clock == expected_.clock);
    CHECK(!reducer_.is_open() && applied_ == ++num_steps_);
  }

 private:
  static constexpr RecordFormat kGrads{kDim, false};

  // Begins the step with the rank's own gradients, which must outlive apply() unless they are copied.
  void begin(int64_t step, const Batch& own) {
    first_.assign(kRanks + 1, 0);
    std::fill(first_.begin() + own_rank_ + 1, first_.end(), own.size());
    reducer_.begin(step, {own.order.data(), own.keys.data(), first_.data()}, own.values.data(), once_in(random_, 2));
    CHECK(reducer_.is_open());
  }

  // The other ranks send in a random order, each as much as its ring has room for.
  void deliver(int64_t step, const std::vector<Batch>& batches) {
    Ints begins(kRanks, 0);
    std::vector<bool> is_sent(kRanks, false);
    is_sent[own_rank_] = true;
    while (std::find(is_sent.begin(), is_sent.end(), false) != is_sent.end()) {
      const int64_t rank = pick(random_, kRanks);
      if (!is_sent[rank]) is_sent[rank] = origins_[rank].send_fitting(step, batches[rank], &begins[rank]);
      if (once_in(random_, 3)) continue;
      const int64_t awaited = std::find(is_sent.begin(), is_sent.end(), false) - is_sent.begin();
      CHECK(reducer_.poll() == (awaited == kRanks) && reducer_.awaited() == awaited);
    }
  }

  static std::map<int64_t, Floats> summed(const std::vector<Batch>& batches) {
    std::map<int64_t, OfRanks> grads;
    for (int64_t rank = 0; rank < kRanks; ++rank)
      for (int64_t i = 0; i < batches[rank].size(); ++i) {
        const float* grad = batches[rank].values.data() + batches[rank].order[i] * kDim;
        grads[batches[rank].keys[i]][rank] = Floats(grad, grad + kDim);
      }
    std::map<int64_t, Floats> sums;
    for (const auto& [row, of_row] : grads) sums[row] = block_sum(of_row, 0, kRanks);
    return sums;
  }

  Random random_;
  int64_t own_rank_;
  Rings rings_;
  OwnedRows rows_, expected_{20};
  int64_t applied_ = 0, num_steps_ = 0;
  Ints first_;
  StepReducer reducer_;
  std::vector<Origin> origins_;
};

// Pushes and pulls of one client to a node of two owners.
struct Client {
  Ints keys, order, first, pulled, places, pulled_first;
  Clocks clocks, counts, known;
  Floats values;

  Client(Random& random, std::array<Tally*, 2> tallies, int64_t num_rows)
      : first{0}, pulled_first{0}, known(2 * num_rows), values() {
    places = permutation(random, 2 * num_rows);
    for (Tally* tally : tallies) {
      const Batch batch = tally->draw(random, pick_in(random, 0, 30), 0, num_rows);
      const int64_t before = static_cast<int64_t>(keys.size());
      keys.insert(keys.end(), batch.keys.begin(), batch.keys.end());
      for (const int64_t j : batch.order) order.push_back(before + j);
      clocks.insert(clocks.end(), batch.clocks.begin(), batch.clocks.end());
      counts.insert(counts.end(), batch.counts.begin(), batch.counts.end());
      values.insert(values.end(), batch.values.begin(), batch.values.end());
      first.push_back(static_cast<int64_t>(keys.size()));
      for (int64_t n = pick_in(random, 0, num_rows); n > 0; --n) pulled.push_back(pick_in(random, 0, num_rows - 1));
      pulled_first.push_back(static_cast<int64_t>(pulled.size()));
    }
    places.resize(pulled.size());
    for (int32_t& clock : known) clock = pick(random, 2) ? kNoLine : static_cast<int32_t>(pick(random, 10000));
  }

  RequestLayout request(int64_t bound) const {
    const hetmpi::Push push{0,
                            {order.data(), keys.data(), first.data()},
                            {nullptr, clocks.data(), counts.data(), nullptr, values.data()},
                            false};
    return {{places.data(), pulled.data(), pulled_first.data()}, known.data(), {1, bound, 0}, {push}, kSums, {kDim}};
  }

  void check(const RequestLayout& request, const std::vector<int64_t>& reply, int64_t bound,
             std::array<const OwnedRows*, 2> owners) const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(reply.data());
    const int64_t size = static_cast<int64_t>(reply.size()) * kWord;
    Clocks versions(known.size(), -7);
    std::vector<float> out(known.size() * kDim, 0.5f);
    const auto fetched = std::make_unique<uint8_t[]>(known.size());
    CHECK(request.read_clocks({0, 1}, bytes, size, versions.data(), fetched.get()) == size);
    if (size > 0)
      CHECK(throws<std::out_of_range>(
          [&] { request.read_clocks({0, 1}, bytes, size - kWord, versions.data(), fetched.get()); }));
    request.place({0, 1}, bytes, size, {out.data()});
    for (int64_t owner = 0; owner < 2; ++owner)
      for (int64_t i = pulled_first[owner]; i < pulled_first[owner + 1]; ++i) {
        const int64_t place = places[i], row = pulled[i];
        CHECK(versions[place] == owners[owner]->clock[row]);
        CHECK(fetched[place] == (known[place] == kNoLine || versions[place] > known[place] + bound));
        const float* expected = owners[owner]->weight.data() + row * kDim;
        for (int64_t d = 0; d < kDim; ++d) CHECK(out[place * kDim + d] == (fetched[place] ? expected[d] : 0.5f));
      }
  }
};

NodeShard shard_of(const OwnedRows& rows) { return {rows.clock.data(), {rows.weight.data()}, rows.directory.get()}; }

std::vector<int64_t> written(const RequestLayout& request) {
  std::vector<int64_t> message(request.bytes({0, 1}) / kWord);
  request.write({0, 1}, reinterpret_cast<uint8_t*>(message.data()));
  return message;
}

void a_server_applies_passes_on_and_replies(uint64_t seed) {
  Random random(seed);
  Owner own(1, 0, {}), other(1, 256, {0});  // the ring of the other holds a few rows at a time
  const int64_t num_rows = own.rows.num_rows;
  RingProducer ring = other.rings.producer(0);
  const NodeRows node({shard_of(own.rows), shard_of(other.rows)}, {0, 1}, 0, {kDim}, own.applier.get());
  TableServer server(&node, std::vector<TableServer::Rings>(3, {nullptr, &ring}), kSums);
  Tally of_own(num_rows), of_other(num_rows);
  for (int round = 0; round < 200; ++round) {
    const int64_t bound = pick_in(random, 0, 5000);
    std::vector<Client> clients;
    std::vector<std::vector<int64_t>> messages;
    for (int i = 0; i < 3; ++i) {
      clients.emplace_back(random, std::array<Tally*, 2>{&of_own, &of_other}, num_rows);
      messages.push_back(written(clients.back().request(bound)));
      const auto* bytes = reinterpret_cast<const uint8_t*>(messages.back().data());
      CHECK(server.take(i, bytes, messages.back().size() * kWord) == 1);
    }
    while (!server.apply()) std::this_thread::yield();
    for (int i = 0; i < 3; ++i) {
      while (!server.is_ready(i)) std::this_thread::yield();
      std::vector<int64_t> reply(server.reply_bytes(i) / kWord);
      server.write_reply(i, reinterpret_cast<uint8_t*>(reply.data()));
      clients[i].check(clients[i].request(bound), reply, bound, {&own.rows, &other.rows});
      CHECK(server.reply_bytes(i) == 0);
    }
  }
  own.check(of_own);
  other.check(of_other);
}

void a_server_refuses_requests_that_are_too_short_or_name_keys_of_others(uint64_t seed) {
  Random random(seed);
  Owner own(1, 0, {}), other(1, 0, {});
  RingProducer ring = other.rings.producer(0);
  Tally of_own(own.rows.num_rows), of_other(own.rows.num_rows);
  const Directory of_others(Partition("range", 2 * own.rows.num_rows, 2), 1);
  const auto node_of = [&](const Directory& directory) {
    const auto shard = [&](const OwnedRows& rows) {
      return NodeShard{rows.clock.data(), {rows.weight.data()}, &directory};
    };
    return NodeRows({shard(own.rows), shard(other.rows)}, {0, 1}, 0, {kDim}, own.applier.get());
  };
  const NodeRows node = node_of(*own.rows.directory), node_of_others = node_of(of_others);
  const auto server_of = [&](const NodeRows& of) { return TableServer(&of, {{nullptr, &ring}}, kSums); };
  for (int i = 0; i < 50; ++i) {
    Client client(random, {&of_own, &of_other}, own.rows.num_rows);
    const std::vector<int64_t> message = written(client.request(0));
    const auto* bytes = reinterpret_cast<const uint8_t*>(message.data());
    const int64_t cut = pick_in(random, 0, static_cast<int64_t>(message.size()) - 1);
    CHECK(throws<std::out_of_range>([&] { server_of(node).take(0, bytes, cut * kWord); }));
    if (!client.pulled.empty())
      CHECK(throws<std::out_of_range>([&] { server_of(node_of_others).take(0, bytes, message.size() * kWord); }));
  }
}

// Records whose header promises more than they have, or than their message or ring has.
void a_record_that_is_not_whole_is_refused(uint64_t seed) {
  Random random(seed);
  for (const RecordFormat format : {RecordFormat{3, false}, RecordFormat{6, true, true, 3}}) {
    const NumberedStream stream(random, 20, format);
    Rings rings(1, 1 << 16, format);
    Origin(rings, 0).send(0, stream.message(random, 0));
    RingConsumer end = rings.ends()[0];
    Record record;
    CHECK(end.peek(&record));
    auto* header = const_cast<RecordHeader*>(record.header);
    const RecordHeader whole = *header;
    const auto* at = reinterpret_cast<const uint8_t*>(header);
    const auto bytes = static_cast<int64_t>(whole.bytes);
    for (const int64_t num_rows : {int64_t{-1}, whole.num_rows + 100, bytes, INT64_MAX, INT64_MIN}) {
      header->num_rows = num_rows;
      CHECK(throws<std::out_of_range>([&] { end.peek(&record); }));
    }
    header->num_rows = whole.num_rows;
    for (const int64_t wrong : {int64_t{0}, int64_t{8}, bytes + 4, bytes + 64, int64_t{-64}, INT64_MAX}) {
      header->bytes = static_cast<uint64_t>(wrong);
      CHECK(throws<std::out_of_range>([&] { end.peek(&record); }));
    }
    *header = whole;
    CHECK(throws<std::out_of_range>([&] { record_at(at, bytes - 8, format); }));
    CHECK(throws<std::out_of_range>([&] { record_at(at, 8, format); }));
    if (format.square_dim > 0) {  // more rows with squares than there is room for
      auto* counts = const_cast<int32_t*>(record.columns.counts);
      std::fill_n(counts, whole.num_rows, 2);
      header->bytes = (sizeof(RecordHeader) + whole.num_rows * format.row_bytes(1) + 7) / 8 * 8;
      CHECK(whole.num_rows == 0 || throws<std::out_of_range>([&] { end.peek(&record); }));
      *header = whole;
    }
  }
}

void a_server_refuses_records_that_are_not_whole(uint64_t seed) {
  Random random(seed);
  Owner own(1, 0, {});
  const int64_t num_rows = own.rows.num_rows;
  const NodeRows node({shard_of(own.rows)}, {0}, 0, {kDim}, own.applier.get());
  TableServer server(&node, {{nullptr}}, kSums);
  const Batch batch = Tally(num_rows).draw(random, 5, 0, num_rows);
  const std::vector<int64_t> first{0, batch.size()}, none{0, 0};
  const hetmpi::Push push{0,
                          {batch.order.data(), batch.keys.data(), first.data()},
                          {nullptr, batch.clocks.data(), batch.counts.data(), nullptr, batch.values.data()},
                          false};
  const int32_t known = kNoLine;
  const RequestLayout request({nullptr, nullptr, none.data()}, &known, {1, 0, 0}, {push}, kSums, {kDim});
  std::vector<int64_t> whole(request.bytes({0}) / kWord);
  request.write({0}, reinterpret_cast<uint8_t*>(whole.data()));
  const auto take = [&](const std::vector<int64_t>& message) {
    server.take(0, reinterpret_cast<const uint8_t*>(message.data()), message.size() * kWord);
  };
  constexpr size_t kNumPulled = 4, kBytes = 5, kNumRows = 7;  // words of the message
  for (const auto& [word, value] : std::vector<std::pair<size_t, int64_t>>{{kNumPulled, 1},
                                                                           {kNumPulled, -1},
                                                                           {kNumPulled, INT64_MAX},
                                                                           {kBytes, 0},
                                                                           {kBytes, -8},
                                                                           {kBytes, INT64_MAX},
                                                                           {kNumRows, batch.size() + 1},
                                                                           {kNumRows, -1},
                                                                           {kNumRows, INT64_MAX}}) {
    std::vector<int64_t> message = whole;
    message[word] = value;
    CHECK(throws<std::out_of_range>([&] { take(message); }));
    CHECK(server.apply());  // nothing of it was taken
  }
  take(whole);
  CHECK(server.apply());
}

// Two owners without clocks in requests: a reply has all rows, as they are after the step that the request names.
void a_reply_without_clocks_has_all_rows_after_its_step(uint64_t seed) {
  Random random(seed);
  constexpr int64_t kRows = 20;
  OwnedRows rows[2]{OwnedRows(kRows), OwnedRows(kRows)};
  int64_t applied[2]{0, 0};
  Rings rings[2]{Rings(1, 4096, kSums), Rings(1, 4096, kSums)};
  RingProducer producers[2]{rings[0].producer(0), rings[1].producer(0)};
  const NodeRows node({shard_of(rows[0]), shard_of(rows[1])}, {0, 1}, 0, {kDim}, nullptr);
  TableServer server{&node, {{&producers[0], &producers[1]}}, kSums, {&applied[0], &applied[1]}};
  const Batch nothing(random, 0, kDim);
  const Ints none{0, 0, 0};
  for (int64_t step = 0; step < 50; ++step) {
    Ints keys, first{0};
    for (int64_t owner = 0; owner < 2; ++owner) {
      for (int64_t row = 0; row < kRows; ++row)
        if (once_in(random, 2)) keys.push_back(row);
      first.push_back(static_cast<int64_t>(keys.size()));
    }
    const Ints places = permutation(random, static_cast<int64_t>(keys.size()));
    const hetmpi::Push push{step, {nothing.order.data(), nothing.keys.data(), none.data()}, nothing.from(0), true};
    const RequestLayout request{
        {places.data(), keys.data(), first.data()}, nullptr, {1, 0, step + 1}, {push}, kSums, {kDim}};
    const std::vector<int64_t> message = written(request);
    CHECK(server.take(0, reinterpret_cast<const uint8_t*>(message.data()), message.size() * kWord) == 1);
    CHECK(server.apply());
    for (int64_t owner : {1, 0}) {
      CHECK(!server.is_ready(0));
      RingConsumer end = rings[owner].ends()[0];
      for (Record record; end.peek(&record);) end.release(record);
      for (float& value : rows[owner].weight) value = static_cast<float>(pick(random, 1 << 20));
      ++applied[owner];
    }
    CHECK(server.is_ready(0));
    std::vector<int64_t> reply(server.reply_bytes(0) / kWord);
    auto* bytes = reinterpret_cast<uint8_t*>(reply.data());
    server.write_reply(0, bytes);
    CHECK(server.reply_bytes(0) == 0);
    const auto size = static_cast<int64_t>(reply.size()) * kWord;
    Floats out(keys.size() * kDim, -1.0f);
    request.place({0, 1}, bytes, size, {out.data()});
    for (int64_t owner = 0; owner < 2; ++owner)
      for (int64_t i = first[owner]; i < first[owner + 1]; ++i)
        CHECK(std::equal(&out[places[i] * kDim], &out[places[i] * kDim] + kDim, &rows[owner].weight[keys[i] * kDim]));
    CHECK(size == 0 || throws<std::out_of_range>([&] { request.place({0, 1}, bytes, size - kWord, {out.data()}); }));
  }
}

// A message of one table.
Words message_of(const std::vector<int64_t>& section) {
  std::vector<int64_t> message{static_cast<int64_t>(section.size())};
  message.insert(message.end(), section.begin(), section.end());
  return words_of(std::move(message));
}

// A server of one node and owner, with three clients, and what it answers.
struct ServerTrial {
  Owner own{1, 0, {}};
  NodeRows node{{shard_of(own.rows)}, {0}, 0, {kDim}, own.applier.get()};
  TableServer table{&node, std::vector<TableServer::Rings>(3, {nullptr}), kSums};
  Server server;
  std::vector<std::vector<int64_t>> replies[3];  // to each client

  explicit ServerTrial(bool in_rounds = true) : server({1, 2, 3}, 0, in_rounds) { server.set_tables({&table}); }

  void proceed() {
    server.proceed();
    Words reply;
    for (size_t i = 0; i < 3; ++i)
      while (server.take(i, &reply)) replies[i].emplace_back(reply.at, reply.at + reply.num);
  }
};

// Gradients, whose sum depends on their order, and the request of a client to one owner.
std::vector<int64_t> request_to_one(Random& random, int64_t num_rows, int64_t reason = 1) {
  const Batch batch = gradients(random, num_rows);
  const auto num = static_cast<int64_t>(batch.keys.size());
  const Clocks counts(num, 1), clocks(num, 0), known(num, kNoLine);
  const Ints first{0, num};
  const RouteView route{batch.order.data(), batch.keys.data(), first.data()};
  const hetmpi::Push push{0, route, {nullptr, clocks.data(), counts.data(), nullptr, batch.values.data()}, false};
  const RequestLayout request(route, known.data(), {reason, kUnbounded, 0}, {push}, kSums, {kDim});
  std::vector<int64_t> message(request.bytes({0}) / kWord);
  request.write({0}, reinterpret_cast<uint8_t*>(message.data()));
  return message;
}

void in_rounds_the_order_of_arrival_decides_nothing(uint64_t seed) {
  Random random(seed);
  constexpr int kRounds = 30;
  ServerTrial first;
  const int64_t num_rows = first.own.rows.num_rows;
  std::vector<std::vector<int64_t>> sent[3];
  for (int round = 0; round < kRounds; ++round)
    for (auto& of_client : sent) of_client.push_back(request_to_one(random, num_rows));
  for (int round = 0; round < kRounds; ++round) {
    first.server.expect({1});
    for (int i = 0; i < 3; ++i) first.server.put(i, message_of(sent[i][round]));
    first.proceed();
    CHECK(first.server.num_answered() == round + 1);
  }
  for (int trial = 0; trial < 20; ++trial) {
    ServerTrial other;
    size_t num_put[3] = {0, 0, 0};
    int num_expected = 0;
    while (other.server.num_answered() < kRounds) {
      const int which = pick(random, 5);
      if (which < 3 && num_put[which] < kRounds && once_in(random, 2))  // also ahead of other clients
        other.server.put(which, message_of(sent[which][num_put[which]++]));
      else if (which == 3 && num_expected < kRounds && once_in(random, 3))
        other.server.expect({1}), ++num_expected;
      else
        other.proceed();
      CHECK(other.server.num_answered() <= num_expected);  // nothing before this rank makes the call
    }
    other.proceed();
    for (int i = 0; i < 3; ++i) CHECK(other.replies[i] == first.replies[i]);
    CHECK(other.own.rows.weight == first.own.rows.weight && other.own.rows.clock == first.own.rows.clock);
  }
}

void as_they_come_a_client_waits_for_no_other(uint64_t seed) {
  Random random(seed);
  ServerTrial trial(false);
  for (int round = 0; round < 20; ++round) {
    trial.server.put(1, message_of(request_to_one(random, trial.own.rows.num_rows)));
    CHECK(!trial.server.is_free(1) && trial.server.is_free(0));
    trial.proceed();
    CHECK(trial.replies[1].size() == static_cast<size_t>(round) + 1 && trial.server.is_free(1));
  }
  CHECK(trial.replies[0].empty() && trial.server.num_answered() == 0);
}

void another_call_of_a_client_is_refused(uint64_t seed) {
  Random random(seed);
  const std::map<std::pair<int64_t, int64_t>, std::string> texts = {
      {{0, 2}, "rank 2 reads a batch that was not announced while rank 0 flushes"},
      {{1, kPushes}, "rank 2 announces a batch while rank 0 announces none"},
      {{3, kNoSection}, "rank 2 uses a table while rank 0 does not use the table"},
  };
  for (const auto& [reasons, text] : texts) {
    const auto [theirs, ours] = reasons;
    ServerTrial trial;
    trial.server.expect({ours});
    for (int i = 0; i < 3; ++i) {
      const int64_t reason = i == 1 ? theirs : ours;
      const bool has_section = reason != kNoSection;
      trial.server.put(i, has_section ? message_of(request_to_one(random, 20, reason)) : words_of({0}));
    }
    CHECK(error_of([&] { trial.server.proceed(); }).find(text) != std::string::npos);
  }
}

void a_server_refuses_messages_that_are_not_whole(uint64_t seed) {
  Random random(seed);
  const std::vector<int64_t> section = request_to_one(random, 20);
  const auto num = static_cast<int64_t>(section.size());
  for (const int64_t length : {num + 1, int64_t{-1}, INT64_MAX, INT64_MIN, num - 1}) {
    ServerTrial trial(false);
    std::vector<int64_t> message{length};
    message.insert(message.end(), section.begin(), section.end());
    trial.server.put(0, words_of(message));
    CHECK(throws<std::out_of_range>([&] { trial.server.proceed(); }));
  }
  ServerTrial trial(false);
  trial.server.put(0, words_of({}));
  CHECK(throws<std::out_of_range>([&] { trial.server.proceed(); }));
  std::vector<int64_t> wrong = section;
  for (const int64_t reason : {int64_t{4}, int64_t{-2}, INT64_MAX}) {
    wrong[0] = reason;
    ServerTrial of_reason(false);
    of_reason.server.put(0, message_of(wrong));
    CHECK(throws<std::out_of_range>([&] { of_reason.server.proceed(); }));
  }
}

// A wire between two ranks of one process, whose messages take some looks to arrive.
struct SlowWire : Wire {
  explicit SlowWire(Random& random) : random(random) {}

  void send(int64_t tag, std::vector<Addressed> messages) override {
    for (Addressed& message : messages) other->lines[tag].push_back({pick(random, 4), std::move(message.words)});
  }
  void expect(int64_t, const Ranks&) override {}
  std::vector<Addressed> arrived(int64_t tag, const Ranks& partners) override {
    auto& line = lines[tag];
    if (partners.empty() || line.empty() || line.front().first-- > 0) return {};
    std::vector<Addressed> found{{partners.front(), std::move(line.front().second)}};
    line.pop_front();
    return found;
  }
  bool publish() override { return true; }

  Random& random;
  SlowWire* other = nullptr;
  std::map<int64_t, std::deque<std::pair<int64_t, Words>>> lines;  // by tag: looks until it arrives
};

// Waits while the other rank polls.
struct PollingWaits : Waits {
  void wait(const std::function<bool()>& look, const std::function<Awaited()>& what) override {
    for (int64_t looks = 0; !look(); ++looks) {
      other->poll();
      CHECK(looks < 1000 && !what().text.empty());
    }
  }
  Exchange* other = nullptr;
};

// One of two ranks that ask each other for rows.
struct ExchangeTrial {
  ExchangeTrial(int64_t rank, Random& random)
      : other(1 - rank),
        server({other}, rank, false),
        wire(random),
        exchange(&waits, &wire, &server, {other}, {other}) {
    exchange.join(&channel);
  }

  // Asks for row `key` of the other rank, with a gradient for it.
  std::shared_ptr<Request> request(int64_t key, float value) { return request(key, value, channel); }
  std::shared_ptr<Request> request(int64_t key, float value, const Channel& of) {
    struct Memory {
      Clocks clocks{0}, counts{1};
      Floats values;
      std::shared_ptr<const Route> route;
    };
    auto memory = std::make_shared<Memory>();
    const Partition all_there("range", 1000, 2);
    memory->route = std::make_shared<const Route>(all_there, &key, 1);
    memory->values.assign(kDim, value);
    const PushColumns columns{nullptr, memory->clocks.data(), memory->counts.data(), nullptr, memory->values.data()};
    const std::vector<hetmpi::Push> pushes{hetmpi::Push{0, memory->route->view(), columns, false, memory}};
    const auto known = Buffer<int32_t>::of(1);
    known[0] = kNoLine;
    const Buffer<int32_t> versions(std::shared_ptr<void>(memory, memory->clocks.data()), 1);
    return std::make_shared<Request>(of, RequestHeader{1, kUnbounded, 0}, memory->route, pushes, known, versions);
  }

  int64_t other;
  Owner own{1, 0, {}};
  NodeRows node{{shard_of(own.rows)}, {0}, 0, {kDim}, own.applier.get()};
  TableServer table{&node, {{nullptr}}, kSums};
  Server server;
  SlowWire wire;
  PollingWaits waits;
  Exchange exchange;
  Channel channel{nullptr, &table, {{0}}, kSums, {kDim}, false, true};
};

void an_exchange_brings_rows_with_the_gradients_in_front(uint64_t seed) {
  Random random(seed);
  ExchangeTrial first(0, random), second(1, random);
  first.wire.other = &second.wire, second.wire.other = &first.wire;
  first.waits.other = &second.exchange, second.waits.other = &first.exchange;
  float sum = 0;
  for (int step = 1; step <= 10; ++step) {
    const auto value = static_cast<float>(pick(random, 5)), theirs = static_cast<float>(pick(random, 5));
    const auto ours = first.request(3, value), other = second.request(4, theirs);
    first.exchange.ask({ours});
    second.exchange.ask({other});
    CHECK(first.exchange.awaits(&first.channel) && ours->round() == step - 1);
    first.exchange.receive(ours->round());
    CHECK(!first.exchange.awaits(&first.channel) && ours->fetched() == std::vector<uint8_t>{1});
    CHECK(ours->num_bytes() == kDim * static_cast<int64_t>(sizeof(float)));
    Floats row(kDim);
    ours->place({row.data()});
    sum -= value;
    CHECK(row == Floats(kDim, sum));
    if (step % 2) second.exchange.drop(*other);  // and the next ones with the one after
  }
  second.exchange.receive_all();
  CHECK(first.exchange.poll() && second.exchange.poll());
}

void a_reply_that_is_not_whole_ends_the_messages(uint64_t seed) {
  Random random(seed);
  ExchangeTrial first(0, random), second(1, random);
  first.wire.other = &second.wire, second.wire.other = &first.wire;
  first.waits.other = &second.exchange, second.waits.other = &first.exchange;
  const auto ours = first.request(3, 1);
  first.exchange.ask({ours});
  second.exchange.ask({second.request(4, 1)});
  first.wire.lines[kReplyTag].push_back({0, words_of({5, 1})});
  CHECK(throws<std::out_of_range>([&] { first.exchange.receive(ours->round()); }));
  CHECK(first.exchange.is_broken() && !first.exchange.awaits(&first.channel));
  CHECK(throws<std::runtime_error>([&] { first.exchange.ask({first.request(3, 1)}); }));
  CHECK(throws<std::runtime_error>([&] { first.exchange.receive(ours->round()); }));
  first.exchange.drop(*ours);
}

void a_table_may_leave_while_its_reply_is_under_way(uint64_t seed) {
  Random random(seed);
  ExchangeTrial first(0, random), second(1, random);
  first.wire.other = &second.wire, second.wire.other = &first.wire;
  first.waits.other = &second.exchange, second.waits.other = &first.exchange;
  auto leaves = std::make_unique<Channel>(first.channel), stays = std::make_unique<Channel>(second.channel);
  first.exchange.join(leaves.get());
  second.exchange.join(stays.get());
  const auto ours = first.request(3, 1);
  first.exchange.ask({ours, first.request(5, 1, *leaves)});
  second.exchange.ask({second.request(3, 1), second.request(5, 1, *stays)});
  CHECK(first.exchange.awaits(leaves.get()) && first.exchange.remove(leaves.get()));
  CHECK(!first.exchange.awaits(leaves.get()));
  leaves.reset();
  first.exchange.receive(ours->round());
  Floats row(kDim);
  ours->place({row.data()});
  CHECK(row == Floats(kDim, -1.0f));
  CHECK(throws<std::out_of_range>([&] { ours->place({row.data()}); }));  // its replies are freed
}

void a_table_of_another_group_is_refused(uint64_t seed) {
  Random random(seed);
  ExchangeTrial first(0, random), second(1, random);
  const auto theirs = second.request(3, 1);
  CHECK(error_of([&] { first.exchange.ask({theirs}); }).find("put into another group") != std::string::npos);
  CHECK(!first.exchange.remove(&first.channel));  // the last one
}

// A wire that brings a message to the other rank's server, and its replies back, when this rank looks.
struct DirectWire : Wire {
  void send(int64_t, std::vector<Addressed> messages) override {
    for (Addressed& message : messages) unsent.push_back(std::move(message.words));
    proceed();
  }
  void expect(int64_t, const Ranks&) override {}
  std::vector<Addressed> arrived(int64_t, const Ranks& partners) override {
    proceed();
    if (partners.empty() || replies.empty()) return {};
    std::vector<Addressed> found{{partners.front(), std::move(replies.front())}};
    replies.pop_front();
    return found;
  }
  bool publish() override { return unsent.empty(); }

  void proceed() {
    do {
      if (!unsent.empty() && server->is_free(0)) {
        server->put(0, std::move(unsent.front()));
        unsent.pop_front();
      }
      server->proceed();
      for (Words reply; server->take(0, &reply);) replies.push_back(std::move(reply));
    } while (!unsent.empty() && server->is_free(0));
  }

  Server* server = nullptr;  // of the other rank
  std::deque<Words> unsent, replies;
};

// The parts of a table on one of two ranks, each on a node of its own.
struct TableTrial {
  static constexpr int64_t kRows = 30;

  TableTrial(int64_t rank, bool is_exact, int64_t num_lines)
      : rank(rank),
        rows(kRows),
        directory(partition, rank),
        rings(2, min_ring_capacity(is_exact ? kGrads : kSums) + 8192, is_exact ? kGrads : kSums),
        applier({}, shard(), optimizer_of("sgd")),
        node({{rows.clock.data(), {rows.weight.data()}, &directory}}, {rank}, rank, {kDim},
             is_exact ? nullptr : &applier),
        of_other(rings.producer(1 - rank)),
        table(&node, {{is_exact ? &of_other : nullptr}}, rings.format(),
              is_exact ? std::vector<const int64_t*>{&applied} : std::vector<const int64_t*>{}),
        server({1 - rank}, rank, false),
        exchange(&waits, &wire, &server, {1 - rank}, {}),
        channel{nullptr, &table, {{1 - rank}}, rings.format(), {kDim}, is_exact, false},
        lines(num_lines, optimizer_of("sgd"), Policy::kLru, RowType::kFloat32),
        space{partition, rank, {uint8_t(rank == 1), uint8_t(rank == 0)}, {1, 1}, &lines} {
    exchange.join(&channel);
  }

  Shard shard() {
    Shard found = rows.shard();
    found.directory = &directory;
    return found;
  }
  Table parts() { return {&space, &node, &channel, &lines, &spans, &counters, {nullptr, nullptr}}; }

  KeysOfCall drawn(Random& random) {
    Ints keys = permutation(random, 2 * kRows);
    keys.resize(pick(random, 2 * kRows));
    return std::make_shared<const Keys>(space, keys.data(), keys.size(), nullptr);
  }

  // Gradients of whole numbers, which are taken from `sums` (2 * kRows) of each key.
  static Buffer<float> gradients(Random& random, const Keys& keys, Floats* sums) {
    const auto grads = Buffer<float>::of(keys.size() * kDim);
    for (int64_t i = 0; i < keys.size(); ++i) {
      const auto value = static_cast<float>(pick(random, 5));
      std::fill_n(grads.data() + i * kDim, kDim, value);
      (*sums)[keys.array[i]] -= value;
    }
    return grads;
  }

  void check(const Floats& sums) const {
    for (int64_t row = 0; row < kRows; ++row)
      for (int64_t d = 0; d < kDim; ++d) CHECK(rows.weight[row * kDim + d] == sums[partition.key_of(rank, row)]);
  }

  static constexpr RecordFormat kGrads{kDim, false};
  const Partition partition{"hash", 2 * kRows, 2};
  int64_t rank, applied = 0;
  OwnedRows rows;
  Directory directory;
  Rings rings;
  PushApplier applier;
  NodeRows node;
  RingProducer of_other;
  TableServer table;
  Server server;
  DirectWire wire;
  PollingWaits waits;
  Exchange exchange;
  Channel channel;
  HostLines lines;
  KeySpace space;
  Spans spans{true};
  Counters counters;
};

void meet(TableTrial& first, TableTrial& second) {
  first.wire.server = &second.server, second.wire.server = &first.server;
  first.waits.other = &second.exchange, second.waits.other = &first.exchange;
}

// Two ranks that read and write in turns, with batches announced and not read, evictions and pulls of several batches.
void clients_of_a_bound_lose_nothing_and_see_their_own_updates(uint64_t seed) {
  Random random(seed);
  for (const int64_t bound : {int64_t{1}, int64_t{4}, kUnbounded}) {
    TableTrial trials[2]{{0, false, 12}, {1, false, 40}};
    meet(trials[0], trials[1]);
    const auto rates = [](int64_t) { return std::vector<double>{1, 1}; };
    const BoundedClient::Settings settings{bound, bound == 4 ? size_t{2} : size_t{1}, 1.0f};
    BoundedClient clients[2]{{trials[0].parts(), &trials[0].applier, optimizer_of("sgd"), rates, settings},
                             {trials[1].parts(), &trials[1].applier, optimizer_of("sgd"), rates, settings}};
    for (BoundedClient& client : clients) client.set_rates();  // others may push before its first write
    std::deque<KeysOfCall> ahead[2];
    Floats sums(2 * TableTrial::kRows, 0.0f);
    for (int step = 0; step < 200; ++step) {
      const int64_t rank = pick(random, 2);
      BoundedClient* client = &clients[rank];
      if (once_in(random, 4)) ahead[rank].clear();  // announced in vain
      const KeysOfCall keys = ahead[rank].empty() ? trials[rank].drawn(random) : ahead[rank].front();
      if (!ahead[rank].empty()) ahead[rank].pop_front();
      const ModelRows before = BoundedClient::read({client}, {keys}).at(0);
      if (ahead[rank].size() < 3) {
        ahead[rank].push_back(trials[rank].drawn(random));
        BoundedClient::announce({client}, {ahead[rank].back()});
      }
      const Floats read(before.at, before.at + keys->size() * kDim);
      const auto grads = TableTrial::gradients(random, *keys, &sums);
      BoundedClient::write({client}, {keys}, {{grads.data(), keys->size(), grads.memory()}});
      if (!once_in(random, 3)) continue;
      ahead[rank].clear();
      const ModelRows after = BoundedClient::read({client}, {keys}).at(0);
      for (int64_t i = 0; i < keys->size() * kDim; ++i) CHECK(after.at[i] <= read[i] - grads[i]);
    }
    for (BoundedClient& client : clients) client.send_all();
    for (const TableTrial& trial : trials) trial.check(sums);
    CHECK(trials[0].counters.evicted > 0 && trials[1].counters.hits > 0 && trials[0].counters.misses > 0);
  }
}

// Lines that fail once to look keys up.
struct FailingLines : HostLines {
  using HostLines::HostLines;
  Found ask(const Buffer<int64_t>& keys, const Buffer<int64_t>& slots, const Buffer<int32_t>& known, bool will_write,
            int64_t bound) override {
    if (fails) throw std::runtime_error("planted");
    return HostLines::ask(keys, slots, known, will_write, bound);
  }
  bool fails = false;
};

// Where a request could not be made, later ones are, and no gradient is lost.
void a_request_that_fails_leaves_batches_and_gradients_as_they_were(uint64_t seed) {
  Random random(seed);
  TableTrial trials[2]{{0, false, 12}, {1, false, 40}};
  meet(trials[0], trials[1]);
  FailingLines lines(12, optimizer_of("sgd"), Policy::kLru, RowType::kFloat32);
  Table parts = trials[0].parts();
  parts.lines = &lines;
  const auto rates = [](int64_t) { return std::vector<double>{1, 1}; };
  BoundedClient client(parts, &trials[0].applier, optimizer_of("sgd"), rates, {1, 1, 1.0f});
  trials[1].applier.set_step(std::vector<double>{1}.data(), 1, 1);
  Floats sums(2 * TableTrial::kRows, 0.0f);
  for (int step = 0; step < 30; ++step) {
    const KeysOfCall keys = trials[0].drawn(random), next = trials[0].drawn(random);
    lines.fails = true;
    if (once_in(random, 2)) CHECK(throws<std::runtime_error>([&] { BoundedClient::read({&client}, {keys}); }));
    lines.fails = false;
    BoundedClient::read({&client}, {keys});
    lines.fails = once_in(random, 2);
    CHECK(lines.fails == throws<std::runtime_error>([&] { BoundedClient::announce({&client}, {next}); }));
    lines.fails = false;
    const auto grads = TableTrial::gradients(random, *keys, &sums);
    BoundedClient::write({&client}, {keys}, {{grads.data(), keys->size(), grads.memory()}});
    BoundedClient::read({&client}, {next});
  }
  client.send_all();
  for (const TableTrial& trial : trials) trial.check(sums);
}

// Two ranks in steps: rows read are those after all writes of the step before.
void exact_clients_read_the_sums_of_the_step_before(uint64_t seed) {
  Random random(seed);
  TableTrial trials[2]{{0, true, 0}, {1, true, 0}};
  meet(trials[0], trials[1]);
  const auto client_of = [](TableTrial& trial) {
    StepReducer reducer(trial.rings.ends(), trial.rank, trial.shard(), &trial.applied);
    return ExactClient(trial.parts(), std::move(reducer), optimizer_of("sgd"), [](int64_t) { return 1.0; });
  };
  ExactClient clients[2]{client_of(trials[0]), client_of(trials[1])};
  Floats sums(2 * TableTrial::kRows, 0.0f);
  for (int step = 0; step < 50; ++step) {
    KeysOfCall keys[2];
    for (int64_t rank = 0; rank < 2; ++rank) {
      keys[rank] = trials[rank].drawn(random);
      const ModelRows rows = ExactClient::read({&clients[rank]}, {keys[rank]}).at(0);
      for (int64_t i = 0; i < keys[rank]->size(); ++i) CHECK(rows.at[i * kDim] == sums[keys[rank]->array[i]]);
    }
    for (int64_t rank = 0; rank < 2; ++rank) {
      const auto grads = TableTrial::gradients(random, *keys[rank], &sums);
      const auto write = [&] {
        ExactClient::write({&clients[rank]}, {keys[rank]}, {{grads.data(), keys[rank]->size(), grads.memory()}});
      };
      write();
      std::fill(grads.begin(), grads.end(), -1.0f);  // the caller may change them
      CHECK(throws<std::runtime_error>(write));
    }
    for (ExactClient& client : clients) ExactClient::apply_written({&client});
    for (const TableTrial& trial : trials) trial.check(sums);
    CHECK(clients[0].step() == step + 1 && trials[1].applied == step + 1);
  }
}

void reducer_sums_in_an_order_of_ranks(uint64_t seed) {
  for (int64_t own_rank = 0; own_rank < kRanks; ++own_rank) {
    ReducerTrial trial(own_rank, seed + own_rank);
    for (int64_t step = 0; step < 100; ++step) trial.step(step);
  }
}

void reducer_refuses_other_steps_and_rows_that_are_not_there(uint64_t seed) {
  Random random(seed);
  const RecordFormat format{kDim, false};
  for (const auto& [step, row] : std::map<int64_t, int64_t>{{4, 0}, {6, 0}, {5, -1}}) {
    Rings rings(2, min_ring_capacity(format), format);
    OwnedRows rows(3);
    int64_t applied = 0;
    const Ints none(3, 0);
    StepReducer reducer(rings.ends(), 1, rows.shard(), &applied);
    reducer.begin(5, {nullptr, nullptr, none.data()}, nullptr, false);
    CHECK(!reducer.poll());
    Origin(rings, 0).send(step, one_row(random, row));
    if (row < 0)
      CHECK(reducer.poll() && throws<std::out_of_range>([&] { reducer.apply(optimizer_of("sgd")); }));
    else
      CHECK(throws<std::logic_error>([&] { reducer.poll(); }));
  }
}

// All kinds of keys: with or without a line, a row that came, a need that is decided, a line that is too old.
void the_keys_of_a_pull_are_refreshed_read_or_left_alone(uint64_t) {
  for (int kind = 0; kind < 16; ++kind) {
    const int64_t slot = kind & 1 ? 3 : -1;
    const bool is_old = slot >= 0 && kind & 8;
    const uint8_t fetched = (kind & 2) > 0, is_decided = (kind & 4) > 0;
    uint8_t is_stale = is_old, is_missing = false;
    const JudgedCounts judged = decide(&slot, &fetched, &is_decided, 1, &is_stale, &is_missing);
    const bool has_line = slot >= 0, may_read = !fetched && !is_decided;
    CHECK(is_missing == (may_read && (!has_line || is_old)));
    CHECK(is_stale == (has_line && (fetched || (is_old && !is_decided))));
    CHECK(judged.num_found == has_line && judged.num_stale == is_stale && judged.num_missing == is_missing);
  }
}

// Of five keys of a pull two have lines, and one a row without a line.
void a_batch_of_a_pull_takes_its_lines_and_rows(uint64_t) {
  const int64_t pull_slots[] = {7, -1, -1, 9, -1};
  const int32_t pull_clocks[] = {10, 11, 12, 13, 14};
  const uint8_t is_uncached[] = {false, true, false, false, false};
  const float pull_rows[] = {0, 0, 1, 2, 0, 0, 0, 0, 0, 0};
  const int64_t places[] = {3, 1, 2, 0};
  const uint8_t is_admitted[] = {true, true, false, true};
  int64_t slots[4];
  int32_t clocks[4];
  float rows[8] = {};
  uint8_t is_missing[4];
  const PartCounts counts = part_of_pull({pull_slots, pull_clocks, is_uncached, pull_rows, 2}, places, is_admitted, 3,
                                         4, slots, clocks, rows, is_missing);
  CHECK((Ints(slots, slots + 4) == Ints{9, -1, -1, 7}));
  CHECK(clocks[0] == 13 && clocks[1] == 11 && clocks[2] == 12 && clocks[3] == 10);
  CHECK((Floats(rows, rows + 8) == Floats{0, 0, 1, 2, 0, 0, 0, 0}));
  CHECK(!is_missing[0] && !is_missing[1] && is_missing[2] && !is_missing[3]);
  CHECK(counts.num_missing == 1 && counts.num_repeated == 2 && counts.num_hits == 1);
}

// Random parts of a route, and their keys among those of another batch, found one by one.
void parts_of_a_route_keep_positions_in_the_whole_batch(uint64_t seed) {
  std::mt19937_64 random(seed);
  for (int number = 0; number < 200; ++number) {
    const int64_t num_rows = 50, num_ranks = 1 + static_cast<int64_t>(random() % 5);
    const Partition partition(number % 2 ? "hash" : "range", num_rows, num_ranks);
    Ints all(num_rows), batch, other;
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random);
    batch.assign(all.begin(), all.begin() + random() % num_rows);
    std::shuffle(all.begin(), all.end(), random);
    other.assign(all.begin(), all.begin() + random() % num_rows);
    const auto mask_of = [&](size_t n) {
      std::vector<uint8_t> mask(n);
      for (uint8_t& entry : mask) entry = random() % 2;
      return mask;
    };
    const auto chosen = mask_of(batch.size()), wanted = mask_of(other.size()), ranks = mask_of(num_ranks);
    const Route whole(partition, batch.data(), batch.size()), part = whole.where(chosen.data());
    CHECK(part.size() == std::count(chosen.begin(), chosen.end(), 1) && part.num_positions() == whole.num_positions());
    int64_t num_elsewhere = 0;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      const RouteView view = part.view();
      int64_t before = -1;
      for (int64_t i = view.first[rank]; i < view.first[rank + 1]; before = view.order[i++]) {
        CHECK(view.order[i] > before && chosen[view.order[i]] && view.keys[i] == batch[view.order[i]]);
        CHECK(partition.locate(view.keys[i]).owner == rank);
      }
      if (rank != 0) num_elsewhere += view.num(rank);
    }
    CHECK(part.num_elsewhere(0) == num_elsewhere);
    std::vector<uint8_t> held(batch.size());
    Ints places(batch.size());
    whole.owned_by(ranks.data(), held.data());
    whole.find_in(other.data(), wanted.data(), other.size(), places.data());
    for (size_t i = 0; i < batch.size(); ++i) {
      CHECK(held[i] == ranks[partition.locate(batch[i]).owner]);
      const int64_t at = std::find(other.begin(), other.end(), batch[i]) - other.begin();
      const bool is_there = at < static_cast<int64_t>(other.size()) && wanted[at];
      CHECK(places[i] == (is_there ? at : -1));
    }
  }
  const int64_t outside = 7;
  CHECK(throws<std::out_of_range>([&] { Route(Partition("range", 7, 2), &outside, 1); }));
}

void keys_are_divided_by_where_their_owners_are(uint64_t seed) {
  Random random(seed);
  for (const std::vector<uint8_t>& remote : {std::vector<uint8_t>{0, 1, 0, 1}, {0, 0, 0, 0}, {1, 1, 1, 1}}) {
    const Partition partition("hash", 100, 4);
    const std::vector<uint8_t> admitted{1, 0, 0, 1};
    Ints all(100);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), random);
    const int64_t n = pick(random, 60);
    HostLines lines(0, optimizer_of("sgd"), Policy::kLru, RowType::kFloat32);
    const KeySpace space{partition, 0, remote, admitted, &lines};
    const Keys keys(space, all.data(), n, nullptr);
    int64_t num_remote = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t owner = partition.locate(all[i]).owner;
      CHECK(keys.is_remote[i] == remote[owner] && keys.is_admitted[i] == admitted[owner]);
      num_remote += remote[owner];
    }
    CHECK(keys.route->size() == n && keys.remote_route->size() == num_remote);
    CHECK(keys.local_route->size() == n - num_remote && keys.local_route->num_positions() == n);
    for (const int64_t position : keys.remote_route->order()) CHECK(keys.is_remote[position]);
    for (const int64_t position : keys.local_route->order()) CHECK(!keys.is_remote[position]);
  }
  const int64_t outside = 100;
  HostLines lines(0, optimizer_of("sgd"), Policy::kLru, RowType::kFloat32);
  const KeySpace space{Partition("hash", 100, 4), 0, {0, 0, 0, 0}, {0, 0, 0, 0}, &lines};
  CHECK(throws<std::out_of_range>([&] { Keys(space, &outside, 1, nullptr); }));
}

void run_all(uint64_t seed) {
#define RUN(test) run_test(#test, test, seed)
  const auto run_test = [](const char* name, void (*test)(uint64_t), uint64_t seed) {
    const auto began = std::chrono::steady_clock::now();
    current_case = std::string(name) + ", seed " + std::to_string(seed);
    test(seed);
    const Seconds spent = std::chrono::steady_clock::now() - began;
    std::printf("%-62s seed %llu  %6.2f s\n", name, static_cast<unsigned long long>(seed), spent.count());
    std::fflush(stdout);
  };
  RUN(cache_equals_its_model);
  RUN(an_update_in_two_passes_has_the_bits_of_its_parts);
  RUN(cache_rounds_its_capacity_down_to_whole_sets);
  RUN(cache_uses_the_room_of_sums_handed_out_again);
  RUN(clocks_are_told_of_lines_that_are_young);
  RUN(numbers_of_16_bits_are_rounded_right);
  RUN(rows_are_added_in_order);
  RUN(sums_of_frequent_rows_have_runs);
  RUN(sums_of_squares_are_never_negative);
  RUN(rows_pass_a_ring_in_order_and_once);
  RUN(ring_refuses_capacities_too_small_or_not_aligned);
  RUN(full_ring_takes_nothing_until_the_tail_moves);
  RUN(a_push_reaches_every_owner_once);
  RUN(every_sum_is_applied_once);
  RUN(a_drained_ring_means_applied_sums);
  RUN(who_sees_a_clock_sees_its_row);
  RUN(a_stalled_owner_loses_nothing);
  RUN(an_error_is_kept_and_nothing_more_is_drained);
  RUN(a_wrong_row_of_its_own_is_refused_and_the_applier_goes_on);
  RUN(a_stopped_applier_leaves_the_rings_as_they_are);
  RUN(an_applier_drains_only_the_rings_of_its_origins);
  RUN(one_thread_applies_for_all_tables);
  RUN(appliers_start_and_end_promptly);
  RUN(a_server_applies_passes_on_and_replies);
  RUN(a_server_refuses_requests_that_are_too_short_or_name_keys_of_others);
  RUN(a_record_that_is_not_whole_is_refused);
  RUN(a_server_refuses_records_that_are_not_whole);
  RUN(a_reply_without_clocks_has_all_rows_after_its_step);
  RUN(rank_sums_have_the_bits_of_their_definition);
  RUN(in_rounds_the_order_of_arrival_decides_nothing);
  RUN(as_they_come_a_client_waits_for_no_other);
  RUN(another_call_of_a_client_is_refused);
  RUN(a_server_refuses_messages_that_are_not_whole);
  RUN(an_exchange_brings_rows_with_the_gradients_in_front);
  RUN(a_reply_that_is_not_whole_ends_the_messages);
  RUN(a_table_may_leave_while_its_reply_is_under_way);
  RUN(a_table_of_another_group_is_refused);
  RUN(clients_of_a_bound_lose_nothing_and_see_their_own_updates);
  RUN(a_request_that_fails_leaves_batches_and_gradients_as_they_were);
  RUN(exact_clients_read_the_sums_of_the_step_before);
  RUN(reducer_sums_in_an_order_of_ranks);
  RUN(reducer_refuses_other_steps_and_rows_that_are_not_there);
  RUN(keys_are_divided_by_where_their_owners_are);
  RUN(parts_of_a_route_keep_positions_in_the_whole_batch);
  RUN(the_keys_of_a_pull_are_refreshed_read_or_left_alone);
  RUN(a_batch_of_a_pull_takes_its_lines_and_rows);
#undef RUN
}

}  // namespace
}  // namespace hetmpi

int main(int argc, char** argv) {
  hetmpi::run_all(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1);
  return 0;
}
