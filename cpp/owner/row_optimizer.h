// Row optimizers: the update of one row by its gradients, at its owner.
//
// Each rule is that of torch.optim, restricted to the row; weight decay is torch's (L2, added to the gradient). Adam
// adds eps after the bias correction, which counts the table's steps, as torch.optim.Adam does. Row-wise Adagrad keeps
// one sum per row, of the mean squared gradient (Naumov et al. 2019, FBGEMM). Momentum is SGD's in torch, without
// dampening.
//
// FTRL-Proximal (McMahan et al. 2013, Algorithm 1; eps is its beta) keeps z and n of each number w of a row, whose rate
// is eta = lr / (eps + root(n)): w is where z w + w^2 / (2 eta) + R(w) is least, with R(w) = l1 |w| + l2 w^2 / 2. Here
// the state is n and, in place of z, the slope of R at w, -(z + w / eta): any number in [-l1, l1] where w is 0. A
// gradient g then moves w to the w' with (w' - w) / eta + slope' = slope - g, at the eta of this step. So
//   a learning rate that changes means what FTRL-Proximal says in general: its sigmas add up to 1 / eta;
//   a new row, with state 0, is no case of its own: its random numbers are where the first step starts, and all of l1
//   and l2 acts on them in that step;
//   with l1 = l2 = 0 the rule is Adagrad.
//
// A cache line previews the owner's update of its row (RowOptimizer::preview) with one number of state: the mean over
// the row of the squares that the rule divides by the root of. It is all of the state that is fetched with a row. The
// GPU previews by the same source: `Loop` iterates over a row, with one thread (Serially) or with a warp
// (cuda/cuda_cache.cu), and both round alike.
//
// Gradients may be sums over several iterations of one rank (staleness s >= 1). Such a sum contains what the rule needs
// to act as if the gradients had been applied one by one to the row as it is now:
//   sums (sum_dim): the sum of the gradients (dim), then, except for sgd and momentum, the sum of their squares (dim;
//             rowwise_adagrad: one number, the mean over the row), undefined for a single gradient: square() computes
//             them when they are needed, as most sums are of one;
//   count     iterations summed.
// Sums of several ranks over the same steps are merged by an owner: owner/push_history.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "portable.h"
#include "vectors.h"

namespace hetmpi {

enum class RowRule { kSgd, kAdagrad, kRowwiseAdagrad, kAdam, kMomentum, kFtrl };

inline RowRule row_rule(const std::string& name) {
  if (name == "sgd") return RowRule::kSgd;
  if (name == "adagrad") return RowRule::kAdagrad;
  if (name == "rowwise_adagrad") return RowRule::kRowwiseAdagrad;
  if (name == "adam") return RowRule::kAdam;
  if (name == "momentum") return RowRule::kMomentum;
  if (name == "ftrl") return RowRule::kFtrl;
  throw std::invalid_argument("row optimizer must be sgd, adagrad, rowwise_adagrad, adam, momentum or ftrl, got " +
                              name);
}

struct Pair {
  float first, second;
};

// Iteration over the numbers of a row, one after the other. Sums use kLanes interleaved parts, of which the upper half
// is added to the lower until one is left, as in a warp.
struct Serially {
  static constexpr int kLanes = 32;

  template <typename Work>
  HETMPI_SHARED void each(int64_t n, Work work) const {
    for (int64_t d = 0; d < n; ++d) work(d);
  }

  HETMPI_SHARED void set(float* place, float value) const { *place = value; }

  template <typename Value>
  HETMPI_SHARED float sum(int64_t n, Value value) const {
    float parts[kLanes] = {};
    each_in_lanes(n, [&](int64_t d, int lane) { parts[lane] += value(d); });
    return folded(parts);
  }

  // Two sums in one pass, of the pairs value(d).
  template <typename Value>
  Pair sums(int64_t n, Value value) const {
    float first[kLanes] = {}, second[kLanes] = {};
    each_in_lanes(n, [&](int64_t d, int lane) {
      const Pair pair = value(d);
      first[lane] += pair.first;
      second[lane] += pair.second;
    });
    return {folded(first), folded(second)};
  }

 private:
  template <typename Work>
  HETMPI_SHARED static void each_in_lanes(int64_t n, Work work) {
    int64_t d = 0;
    for (; d + kLanes <= n; d += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) work(d + lane, lane);
    for (int lane = 0; d + lane < n; ++lane) work(d + lane, lane);
  }

  // Loops of constant length, which are vectorised.
  template <int kHalf = kLanes / 2>
  HETMPI_SHARED static float folded(float* parts) {
    for (int lane = 0; lane < kHalf; ++lane) parts[lane] += parts[lane + kHalf];
    if constexpr (kHalf > 1) return folded<kHalf / 2>(parts);
    return parts[0];
  }
};

struct Gradient {
  const float* sum;                // (dim)
  const float* squares = nullptr;  // as in `sums` above; null: one iteration, whose squares are those of `sum`
  float scale = 1;                 // of the gradients
  int64_t count = 1;
  float square_scale = 1;  // of their squares
  int64_t own = 0;  // own updates that the state lacks, this one included (cache_decisions.h); 0: as many as count
};

// The part of a push that other ranks' earlier pushes over the same steps concern (owner/push_history.h).
struct Overlap {
  float fresh;             // iterations of the push that no earlier one covers
  float product;           // factor of the products of the push's gradients and those of `sums` that overlap
  float share;             // of `sums` and `moved`, what overlaps
  float steps;             // that both cover, at least 1
  float* sums = nullptr;   // (dim) gradients of the earlier pushes, weight decay included
  float* moved = nullptr;  // (dim) as far as they moved the row; Adam: before the division by the root. Adam, FTRL only
};

// Drift of an update of a line (cache/cache_decisions.h). step_square: mean square of the step by this rank's gradient;
// row_square: of the row after it.
struct Moved {
  float step_square, row_square;
};

class RowOptimizer {
 public:
  // beta1: also the momentum. l1, l2: of FTRL.
  RowOptimizer(const std::string& rule, int64_t dim, float weight_decay, float beta1, float beta2, float eps,
               float l1 = 0, float l2 = 0)
      : rule_(row_rule(rule)),
        dim_(dim),
        weight_decay_(weight_decay),
        beta1_(beta1),
        beta2_(beta2),
        eps_(eps),
        l1_(l1),
        l2_(l2) {
    if (dim < 1) throw std::invalid_argument("dim must be at least 1, got " + std::to_string(dim));
  }

  HETMPI_SHARED int64_t dim() const { return dim_; }

  // Floats of state beside each row.
  HETMPI_SHARED int64_t state_dim() const {
    switch (rule_) {
      case RowRule::kSgd:
        return 0;
      case RowRule::kAdagrad:
      case RowRule::kMomentum:
        return dim_;
      case RowRule::kRowwiseAdagrad:
        return 1;
      case RowRule::kAdam:
      case RowRule::kFtrl:
        return 2 * dim_;
    }
    return 0;
  }

  // Whether the rule divides by the root of a sum or mean of squared gradients.
  HETMPI_SHARED bool has_squares() const { return rule_ != RowRule::kSgd && rule_ != RowRule::kMomentum; }

  // Floats of state in a cache line.
  HETMPI_SHARED int64_t preview_dim() const { return has_squares() ? 1 : 0; }

  // The state of a line (preview_dim 1), of a row's state (state_dim).
  float mean_square(const float* state) const {
    if (rule_ == RowRule::kRowwiseAdagrad) return *state;
    const bool is_second = rule_ == RowRule::kAdam || rule_ == RowRule::kFtrl;
    const float* squares = is_second ? state + dim_ : state;
    return Serially().sum(dim_, [=](int64_t d) { return squares[d]; }) / static_cast<float>(dim_);
  }

  // Floats of a sum of gradients.
  HETMPI_SHARED int64_t sum_dim() const {
    switch (rule_) {
      case RowRule::kSgd:
      case RowRule::kMomentum:
        return dim_;
      case RowRule::kRowwiseAdagrad:
        return dim_ + 1;
      case RowRule::kAdagrad:
      case RowRule::kAdam:
      case RowRule::kFtrl:
        return 2 * dim_;
    }
    return 0;
  }

  // The learning rate of a step, which counts from 1, and Adam's bias corrections.
  struct Rate {
    float lr = 0, adam_lr = 0, adam_scale = 1;
  };

  Rate rate(double lr, int64_t step) const {
    return {static_cast<float>(lr), static_cast<float>(lr / (1.0 - std::pow(static_cast<double>(beta1_), step))),
            static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(static_cast<double>(beta2_), step)))};
  }

  // Sets the rate of the following applications.
  void set_rate(const Rate& rate) { rate_ = rate; }
  void set_step(double lr, int64_t step) { set_rate(rate(lr, step)); }

  // Whether an update is one addition and one subtraction per number, of `step` times the gradient.
  HETMPI_SHARED bool is_plain() const { return rule_ == RowRule::kSgd && weight_decay_ == 0; }
  HETMPI_SHARED float plain_step(float scale) const { return rate_.lr * scale; }

  // Adds one iteration's gradient to sums (sum_dim) over `count` iterations; with count 0 sums are undefined before.
  template <typename Loop>
  HETMPI_SHARED void add(float* sums, int64_t count, const float* grad, Loop loop) const {
    const int64_t dim = dim_;
    if (count == 0) return loop.each(dim, [=](int64_t d) { sums[d] = 0.0f + grad[d]; });
    float* squares = sums + dim;
    if (count == 1) square(squares, sums, loop);
    loop.each(dim, [=](int64_t d) { sums[d] += grad[d]; });
    if (!has_squares()) return;
    if (rule_ == RowRule::kRowwiseAdagrad)
      loop.set(squares, *squares + mean_of_squares(grad, loop));
    else
      loop.each(dim, [=](int64_t d) { squares[d] += grad[d] * grad[d]; });
  }

  // The squares (sum_dim - dim) of a sum over one iteration.
  template <typename Loop>
  HETMPI_SHARED void square(float* squares, const float* grad, Loop loop) const {
    if (!has_squares()) return;
    if (rule_ == RowRule::kRowwiseAdagrad)
      loop.set(squares, mean_of_squares(grad, loop));
    else
      loop.each(dim_, [=](int64_t d) { squares[d] = grad[d] * grad[d]; });
  }

  // add() and preview() of one iteration's gradient, the latter scaled, after `own` updates, as in Gradient.
  template <typename Row, typename Loop>
  HETMPI_SHARED void add_and_preview(float* sums, int64_t count, Row weight, float* mean_square, const float* grad,
                                     float scale, int64_t own, Loop loop) const {
    add(sums, count, grad, loop);
    preview(weight, mean_square, {grad, nullptr, scale, 1, squares_of(scale), own}, loop);
  }

  // The same on the CPU, to the same bits in two passes over the row, but for rules without squares, and one more for
  // the second gradient. Returns the figures of drift; for rules without squares only if it is limited.
  template <typename Row>
  Moved update(float* __restrict sums, int64_t count, Row weight, float* mean_square, const float* __restrict grad,
               float scale, int64_t own, bool limits_drift) const {
    if (!has_squares()) return update_without_squares(sums, count, weight, grad, scale, own, limits_drift);
    const Terms g = terms({grad, nullptr, scale, 1, squares_of(scale), own});
    const float dim = static_cast<float>(dim_);
    float* __restrict squares = sums + dim_;
    const auto set = [&](int64_t d) { sums[d] = 0.0f + grad[d]; };
    const auto add = [&](int64_t d) { sums[d] += grad[d]; };
    const auto add_both = [&](int64_t d) { sums[d] += grad[d], squares[d] += grad[d] * grad[d]; };
    const auto pass = [&](auto work) {  // one for each case: a loop with a branch would not be vectorised
      return Serially().sums(dim_, [&](int64_t d) {
        work(d);
        return Pair{g.square(weight, d), grad[d] * grad[d]};
      });
    };
    const bool is_rowwise = rule_ == RowRule::kRowwiseAdagrad;
    if (count == 1) square(squares, sums, Serially());
    const Pair seen = count == 0 ? pass(set) : is_rowwise ? pass(add) : pass(add_both);
    if (is_rowwise && count > 0) *squares += seen.second / dim;
    *mean_square = mean_square_after(*mean_square, seen.first / dim, 1);
    const float step = factor(*mean_square) * part_moved(1, own);
    const float squares_of_row = Serially().sum(dim_, [&](int64_t d) {
      weight[d] -= step * g.value(weight, d);
      return weight[d] * weight[d];
    });
    return {step * step * seen.second / dim, squares_of_row / dim};
  }

  void preview(float* weight, float* mean_square, const Gradient& grad) const {
    if (is_plain()) return subtract(weight, plain_step(grad.scale), grad.sum, dim_);
    preview(weight, mean_square, grad, Serially());
  }

  // The factor of the squares of a gradient that is scaled by `scale` as a preview of the updates of all ranks. For
  // sums of squares, as if all ranks had the same gradient. For Adam, as if the gradients of the ranks were
  // independent: its average forgets the fetched one, and steps that are too small were worse (docs/negative.md,
  // "Cache").
  HETMPI_SHARED float squares_of(float scale) const { return rule_ == RowRule::kAdam ? scale : scale * scale; }

  // A sum over `count` iterations as a gradient; scaled by `scale`. squares: of a single gradient too, by square().
  HETMPI_SHARED Gradient summed(const float* sum, const float* squares, int64_t count, float scale = 1) const {
    return {sum, has_squares() ? squares : nullptr, scale, count, squares_of(scale)};
  }

  // Floats that Overlap points to.
  int64_t overlap_dim() const {
    switch (rule_) {
      case RowRule::kSgd:
      case RowRule::kMomentum:
        return 0;
      case RowRule::kAdagrad:
      case RowRule::kRowwiseAdagrad:
        return dim_;
      case RowRule::kAdam:
      case RowRule::kFtrl:
        return 2 * dim_;
    }
    return 0;
  }

  // Applies a push, as from summed(), as if its gradients and those it overlaps with had been added before the rule was
  // applied: the earlier ones' movement is made anew at the state that results. A sum of squares is at least the square
  // of the sum over the number of terms. Where gradients nearly cancel each other, that keeps rounding errors of the
  // state, under the root, from becoming large steps.
  void merge(float* weight, float* state, const Gradient& push, const Overlap& overlap) const {
    const Terms g = terms(push, overlap.fresh);
    const int64_t count = push.count;
    switch (rule_) {
      case RowRule::kSgd:
        for (int64_t d = 0; d < dim_; ++d) weight[d] -= rate_.lr * g.value(weight, d);
        return;
      case RowRule::kAdagrad:
        return merge_adagrad(weight, state, g, count, overlap);
      case RowRule::kRowwiseAdagrad:
        return merge_rowwise_adagrad(weight, state, g, count, overlap);
      case RowRule::kAdam:
        return merge_adam(weight, state, g, count, overlap);
      case RowRule::kMomentum:
        return merge_momentum(weight, state, g, count, overlap);
      case RowRule::kFtrl:
        return merge_ftrl(weight, state, g, count, overlap);
    }
  }

  // Applies a gradient to a line's copy of a row as its owner is expected to: weight (dim), a float* or a HalfRow
  // (cache/row_type.h); mean_square (preview_dim). Adam's first moment and momentum are not kept: of a gradient, a line
  // moves by the part that they have applied on average by now, if all gradients since the fetch were alike. FTRL's l1
  // and l2 act at the owner alone.
  template <typename Row, typename Loop>
  HETMPI_SHARED void preview(Row weight, float* mean_square, const Gradient& grad, Loop loop) const {
    if (rule_ == RowRule::kSgd) return sgd(weight, grad, loop);
    const Terms g = terms(grad);
    if (rule_ == RowRule::kMomentum) {
      const float step = rate_.lr * part_moved(grad.count, grad.own);
      return loop.each(dim_, [=](int64_t d) { weight[d] -= step * g.value(weight, d); });
    }
    const float before = *mean_square, squares = mean_squares(g, weight, loop);
    const float after = mean_square_after(before, squares, grad.count);
    loop.set(mean_square, after);
    const float step = factor(after) * part_moved(grad.count, grad.own);
    loop.each(dim_, [=](int64_t d) { weight[d] -= step * g.value(weight, d); });
  }

  // The mean square of one iteration's gradient as a step of the row, at this state of the line, after `own` updates.
  template <typename Loop>
  HETMPI_SHARED float step_square(const float* mean_square, const float* grad, int64_t own, Loop loop) const {
    const float step = (has_squares() ? factor(*mean_square) : rate_.lr) * part_moved(1, own);
    return step * step * loop.sum(dim_, [=](int64_t d) { return grad[d] * grad[d]; }) / static_cast<float>(dim_);
  }

  // Applies one iteration's gradient (dim), summed over all ranks, to a row: weight (dim), state (state_dim).
  void apply(float* weight, float* state, const float* grad) const {
    if (is_plain()) return subtract(weight, rate_.lr, grad, dim_);
    apply_rule(weight, state, grad);
  }

  template <typename Loop>
  HETMPI_SHARED void apply(float* weight, float* state, const float* grad, Loop loop) const {
    const Gradient sum{grad};
    switch (rule_) {
      case RowRule::kSgd:
        return sgd(weight, sum, loop);
      case RowRule::kAdagrad:
        return adagrad(weight, state, terms(sum), loop);
      case RowRule::kRowwiseAdagrad:
        return preview(weight, state, sum, loop);
      case RowRule::kAdam:
        return adam(weight, state, terms(sum), loop);
      case RowRule::kMomentum:
        return momentum(weight, state, terms(sum), loop);
      case RowRule::kFtrl:
        return ftrl(weight, state, terms(sum), loop);
    }
  }

 private:
  // A function of its own, so that plain updates are inlined in their loops.
  [[gnu::noinline]] void apply_rule(float* weight, float* state, const float* grad) const {
    apply(weight, state, grad, Serially());
  }

  template <typename Row, typename Loop>
  HETMPI_SHARED float mean_of_squares(Row row, Loop loop) const {
    return loop.sum(dim_, [=](int64_t d) { return row[d] * row[d]; }) / static_cast<float>(dim_);
  }

  template <typename Row>
  Moved update_without_squares(float* sums, int64_t count, Row weight, const float* grad, float scale, int64_t own,
                               bool limits_drift) const {
    const bool is_one_pass = std::is_same_v<Row, float*> && is_plain() && count > 0;
    if constexpr (std::is_same_v<Row, float*>)
      if (is_one_pass) add_and_subtract(sums, weight, plain_step(scale), grad, dim_);
    if (!is_one_pass) add_and_preview(sums, count, weight, nullptr, grad, scale, own, Serially());
    if (!limits_drift) return {};
    return {step_square(nullptr, grad, own, Serially()), mean_of_squares(weight, Serially())};
  }

  // Sum of the scaled gradient and the row's decay at component d, and its square. If the two nearly cancel, rounding
  // could make a sum of squares negative, with NaN as its root.
  struct Terms {
    const float* sum;
    const float* squares;
    float scale, square_scale, decay, decay_once, fresh, share;

    template <typename Row>
    HETMPI_SHARED float value(Row weight, int64_t d) const {
      return scale * sum[d] + decay * weight[d];
    }

    template <typename Row>
    HETMPI_SHARED float square(Row weight, int64_t d) const {
      if (squares != nullptr) return square_of_sum(weight, d);
      const float g = scale * sum[d], once = decay_once * weight[d];
      return at_least_zero((g + once) * (g + once) + (square_scale - scale * scale) * sum[d] * sum[d]);
    }

    // REQUIRES: squares. Without the branch, loops are vectorised.
    template <typename Row>
    HETMPI_SHARED float square_of_sum(Row weight, int64_t d) const {
      const float g = scale * sum[d], once = decay_once * weight[d];
      return at_least_zero(square_scale * squares[d] + 2 * once * g * share + fresh * once * once);
    }
  };

  HETMPI_SHARED Terms terms(const Gradient& grad, float fresh) const {
    return {grad.sum,
            grad.squares,
            grad.scale,
            grad.square_scale,
            weight_decay_ * fresh,
            weight_decay_,
            fresh,
            fresh / static_cast<float>(grad.count)};
  }

  HETMPI_SHARED Terms terms(const Gradient& grad) const { return terms(grad, static_cast<float>(grad.count)); }

  // The functions below copy all members except the row to locals: a store to the row could otherwise alias them, which
  // would prevent vectorisation.

  template <typename Row, typename Loop>
  HETMPI_SHARED void sgd(Row weight, const Gradient& grad, Loop loop) const {
    const float* sum = grad.sum;
    const float lr = rate_.lr, scale = grad.scale, decay = weight_decay_ * static_cast<float>(grad.count);
    if (decay == 0) {
      const float step = lr * scale;
      loop.each(dim_, [=](int64_t d) { weight[d] -= step * sum[d]; });
    } else {
      loop.each(dim_, [=](int64_t d) { weight[d] -= lr * (scale * sum[d] + decay * weight[d]); });
    }
  }

  template <typename Loop>
  HETMPI_SHARED void adagrad(float* weight, float* sum, Terms g, Loop loop) const {
    const float lr = rate_.lr, eps = eps_;
    loop.each(dim_, [=](int64_t d) {
      const float value = g.value(weight, d);
      sum[d] += g.square(weight, d);
      weight[d] -= lr * value / (std::sqrt(sum[d]) + eps);
    });
  }

  template <typename Loop>
  HETMPI_SHARED void adam(float* weight, float* state, Terms g, Loop loop) const {
    float* mean = state;             // (dim)
    float* variance = state + dim_;  // (dim)
    const float keep1 = beta1_, keep2 = beta2_, take1 = 1 - keep1, take2 = 1 - keep2;
    const float lr = rate_.adam_lr, scale = rate_.adam_scale, eps = eps_;
    loop.each(dim_, [=](int64_t d) {
      mean[d] = keep1 * mean[d] + take1 * g.value(weight, d);
      variance[d] = keep2 * variance[d] + take2 * g.square(weight, d);
      weight[d] -= lr * mean[d] / (std::sqrt(variance[d]) * scale + eps);
    });
  }

  template <typename Loop>
  HETMPI_SHARED void momentum(float* weight, float* velocity, Terms g, Loop loop) const {
    const float keep = beta1_, lr = rate_.lr;
    loop.each(dim_, [=](int64_t d) {
      velocity[d] = keep * velocity[d] + g.value(weight, d);
      weight[d] -= lr * velocity[d];
    });
  }

  template <typename Loop>
  HETMPI_SHARED void ftrl(float* weight, float* state, Terms g, Loop loop) const {
    float* slope = state;       // (dim)
    float* sum = state + dim_;  // (dim)
    const float lr = rate_.lr, eps = eps_, l1 = l1_, l2 = l2_;
    if (lr == 0) return;
    loop.each(dim_, [=](int64_t d) {
      const float value = g.value(weight, d);
      sum[d] += g.square(weight, d);
      const Proximal to = proximal_step(weight[d], slope[d] - value, lr, std::sqrt(sum[d]) + eps, l1, l2);
      weight[d] = to.weight;
      slope[d] = to.slope;
    });
  }

  struct Proximal {
    float weight, slope;
  };

  // The w' with (w' - from) / eta + slope' = force, as at the top of this file, and slope'. eta is lr / root. Without
  // branches, so that loops are vectorised. REQUIRES: lr > 0.
  HETMPI_SHARED static Proximal proximal_step(float from, float force, float lr, float root, float l1, float l2) {
    const float eta = lr / root, most = l1 * eta, to = from + eta * force;
    const float pull = larger(-most, to < most ? to : most);
    const float weight = (to - pull) / (1 + l2 * eta);
    return {weight, l2 * weight + pull * (root / lr)};
  }

  // Of the sum of `count` gradients, or of the last one of `own`: the part by which Adam's first moment has moved the
  // row; for momentum, of which a gradient moves the row by 1 / (1 - beta1) in the end, that many times the part.
  HETMPI_SHARED float part_moved(int64_t count, int64_t own) const {
    if (rule_ != RowRule::kAdam && rule_ != RowRule::kMomentum) return 1;
    const float part = own > 0 ? 1 - power(beta1_, own)
                               : 1 - beta1_ * (1 - power(beta1_, count)) / (1 - beta1_) / static_cast<float>(count);
    return rule_ == RowRule::kAdam ? part : part / (1 - beta1_);
  }

  // The state of a line after `count` more gradients with this sum of mean squares.
  HETMPI_SHARED float mean_square_after(float before, float squares, int64_t count) const {
    if (rule_ != RowRule::kAdam) return before + squares;
    const float keep = power(beta2_, count);
    return keep * before + (1 - keep) / static_cast<float>(count) * squares;
  }

  // The step of a row per unit of its gradient, at this mean square.
  HETMPI_SHARED float factor(float mean_square) const {
    if (rule_ == RowRule::kAdam) return rate_.adam_lr / (std::sqrt(mean_square) * rate_.adam_scale + eps_);
    return rate_.lr / (std::sqrt(mean_square) + eps_);
  }

  template <typename Row, typename Loop>
  HETMPI_SHARED float mean_squares(Terms g, Row weight, Loop loop) const {
    const float dim = static_cast<float>(dim_);
    if (g.squares == nullptr || rule_ != RowRule::kRowwiseAdagrad)
      return loop.sum(dim_, [=](int64_t d) { return g.square(weight, d); }) / dim;
    const float decays = loop.sum(dim_, [=](int64_t d) {
      const float once = g.decay_once * weight[d];
      return 2 * once * g.scale * g.sum[d] * g.share + g.fresh * once * once;
    });
    return at_least_zero(g.square_scale * *g.squares + decays / dim);
  }

  // 1 / (number of steps that a push and those it overlaps with sum), at most.
  static float per_step(int64_t count, const Overlap& o) { return 1 / std::max(static_cast<float>(count), o.steps); }

  void merge_adagrad(float* weight, float* state, Terms g, int64_t count, const Overlap& o) const {
    const float each = per_step(count, o);
    const float lr = rate_.lr, eps = eps_, product = o.product, share = o.share;
    float* sums = o.sums;
    for (int64_t d = 0; d < dim_; ++d) {
      const float value = g.value(weight, d), earlier = share * sums[d], before = state[d];
      const float both = earlier + value;
      state[d] = larger(before + g.square_of_sum(weight, d) + product * earlier * value, each * (both * both));
      weight[d] -= lr * both / (std::sqrt(state[d]) + eps) - lr * earlier / (std::sqrt(before) + eps);
      sums[d] += value;
    }
  }

  void merge_rowwise_adagrad(float* weight, float* state, Terms g, int64_t count, const Overlap& o) const {
    float* sums = o.sums;
    const float dim = static_cast<float>(dim_), share = o.share, before = *state;
    const float products = Serially().sum(dim_, [=](int64_t d) { return sums[d] * g.value(weight, d); });
    const float squares = Serially().sum(dim_, [=](int64_t d) {
      const float both = share * sums[d] + g.value(weight, d);
      return both * both;
    });
    *state = larger(before + mean_squares(g, weight, Serially()) + o.product * share * products / dim,
                    per_step(count, o) * squares / dim);
    const float lr = rate_.lr / (std::sqrt(*state) + eps_), earlier_lr = rate_.lr / (std::sqrt(before) + eps_);
    for (int64_t d = 0; d < dim_; ++d) {
      const float value = g.value(weight, d), earlier = share * sums[d];
      weight[d] -= lr * (earlier + value) - earlier_lr * earlier;
      sums[d] += value;
    }
  }

  void merge_adam(float* weight, float* state, Terms g, int64_t num, const Overlap& o) const {
    float* mean = state;             // (dim)
    float* variance = state + dim_;  // (dim)
    float *sums = o.sums, *moved = o.moved;
    const float count = static_cast<float>(num), share = o.share;
    const float keep1 = std::pow(beta1_, o.fresh), keep2 = std::pow(beta2_, o.fresh);
    const float take1 = (1 - power(beta1_, num)) / count, take2 = (1 - power(beta2_, num)) / count;
    const float carried = o.fresh == 1 ? beta1_ : beta1_ * (1 - keep1) / (1 - beta1_);
    const float direct = num == 1 ? take1 : 1 - beta1_ * take1 / (1 - beta1_);
    const float product = o.product * share * (1 - std::pow(beta2_, o.steps)) / o.steps;
    const float lr = rate_.adam_lr, scale = rate_.adam_scale, eps = eps_, each = per_step(num, o);
    for (int64_t d = 0; d < dim_; ++d) {
      const float value = g.value(weight, d), before = variance[d], both = share * sums[d] + value;
      const float move = carried * mean[d] + direct * value, earlier = share * moved[d];
      mean[d] = keep1 * mean[d] + take1 * value;
      variance[d] = larger(keep2 * before + take2 * g.square_of_sum(weight, d) + product * sums[d] * value,
                           take2 * (each * (both * both)));
      weight[d] -= lr * (earlier + move) / (std::sqrt(variance[d]) * scale + eps) -
                   lr * earlier / (std::sqrt(before) * scale + eps);
      sums[d] += value;
      moved[d] += move;
    }
  }

  // As merge_adam with its first moment. Nothing is divided by a root, so no movement is made anew.
  void merge_momentum(float* weight, float* velocity, Terms g, int64_t num, const Overlap& o) const {
    const float fresh = std::max(0.0f, o.fresh);  // rounding below 0 would matter to the power of momentum 0
    const float keep = std::pow(beta1_, fresh);
    const float take = (1 - power(beta1_, num)) / (1 - beta1_) / static_cast<float>(num);
    const float carried = fresh == 1 ? beta1_ : beta1_ * (1 - keep) / (1 - beta1_);
    const float direct = num == 1 ? 1 : part_moved(num, 0), lr = rate_.lr;
    for (int64_t d = 0; d < dim_; ++d) {
      const float value = g.value(weight, d), before = velocity[d];
      velocity[d] = keep * before + take * value;
      weight[d] -= lr * (carried * before + direct * value);
    }
  }

  // The squares are Adagrad's. In z, sigma belongs to the row before the pushes of these steps, from which the earlier
  // ones moved it.
  void merge_ftrl(float* weight, float* state, Terms g, int64_t count, const Overlap& o) const {
    float* slope = state;       // (dim)
    float* sum = state + dim_;  // (dim)
    float *sums = o.sums, *moved = o.moved;
    const float each = per_step(count, o), product = o.product, share = o.share;
    const float lr = rate_.lr, eps = eps_, l1 = l1_, l2 = l2_;
    if (lr == 0) return;
    for (int64_t d = 0; d < dim_; ++d) {
      const float value = g.value(weight, d), earlier = share * sums[d], before = sum[d], from = weight[d];
      const float both = earlier + value;
      sum[d] = larger(before + g.square_of_sum(weight, d) + product * earlier * value, each * (both * both));
      const float root = std::sqrt(sum[d]) + eps, anew = 1 - (std::sqrt(before) + eps) / root;
      const Proximal to = proximal_step(from + anew * (share * moved[d]), slope[d] - value, lr, root, l1, l2);
      weight[d] = to.weight;
      slope[d] = to.slope;
      sums[d] += value;
      moved[d] += from - to.weight;
    }
  }

  // std::max takes references, which prevents vectorisation.
  HETMPI_SHARED static float larger(float a, float b) { return a < b ? b : a; }
  HETMPI_SHARED static float at_least_zero(float value) { return value < 0 ? 0 : value; }

  // By multiplications only, which round alike everywhere, unlike pow().
  HETMPI_SHARED static float power(float base, int64_t exponent) {
    double result = 1, factor = base;
    for (; exponent > 0; exponent /= 2, factor *= factor)
      if (exponent % 2 == 1) result *= factor;
    return static_cast<float>(result);
  }

  RowRule rule_;
  int64_t dim_;
  float weight_decay_, beta1_, beta2_, eps_, l1_, l2_;
  Rate rate_;
};

}  // namespace hetmpi
