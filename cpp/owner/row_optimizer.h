// Row optimizers: the update of one row by its gradients, at its owner.
//
// Each rule is that of torch.optim, restricted to the row; weight decay is torch's (L2, added to the gradient). The
// bias correction of Adam counts the table's steps, as torch.optim.SparseAdam does. Row-wise Adagrad keeps one sum per
// row, of the mean squared gradient (Naumov et al. 2019, FBGEMM).
//
// The GPU uses the same source: `Loop` iterates over a row, with one thread (Serially) or with a warp
// (cuda/cuda_cache.cu), and both round alike.
//
// Gradients may be sums over several iterations of one rank (staleness s >= 1). Such a sum contains what the rule needs
// to act as if the gradients had been applied one by one to the row as it is now:
//   sums (sum_dim): the sum of the gradients (dim), then, except for sgd, the sum of their squares (dim;
//             rowwise_adagrad: one number, the mean over the row);
//   count     iterations summed;
//   advance   iterations that are new to the row: the amount by which the sum advances its clock. Sums of other ranks
//             over the same iterations add their gradients but no second decay: of the weights, or of Adam's moving
//             averages. Adam moves a row only for new iterations; the other gradients enter its averages.
#pragma once

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "portable.h"
#include "vectors.h"

namespace hetmpi {

enum class RowRule { kSgd, kAdagrad, kRowwiseAdagrad, kAdam };

inline RowRule row_rule(const std::string& name) {
  if (name == "sgd") return RowRule::kSgd;
  if (name == "adagrad") return RowRule::kAdagrad;
  if (name == "rowwise_adagrad") return RowRule::kRowwiseAdagrad;
  if (name == "adam") return RowRule::kAdam;
  throw std::invalid_argument("row optimizer must be sgd, adagrad, rowwise_adagrad or adam, got " + name);
}

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
    int64_t d = 0;
    for (; d + kLanes <= n; d += kLanes)
      for (int lane = 0; lane < kLanes; ++lane) parts[lane] += value(d + lane);
    for (int lane = 0; d + lane < n; ++lane) parts[lane] += value(d + lane);
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int lane = 0; lane < half; ++lane) parts[lane] += parts[lane + half];
    return parts[0];
  }
};

struct Gradient {
  const float* sum;                // (dim)
  const float* squares = nullptr;  // as in `sums` above; null: one iteration, whose squares are those of `sum`
  float scale = 1;                 // of the gradients
  int64_t count = 1;
  int64_t advance = 1;
};

class RowOptimizer {
 public:
  RowOptimizer(const std::string& rule, int64_t dim, float weight_decay, float beta1, float beta2, float eps)
      : rule_(row_rule(rule)), dim_(dim), weight_decay_(weight_decay), beta1_(beta1), beta2_(beta2), eps_(eps) {
    if (dim < 1) throw std::invalid_argument("dim must be at least 1, got " + std::to_string(dim));
  }

  HETMPI_SHARED int64_t dim() const { return dim_; }

  // Floats of state beside each row.
  HETMPI_SHARED int64_t state_dim() const {
    switch (rule_) {
      case RowRule::kSgd:
        return 0;
      case RowRule::kAdagrad:
        return dim_;
      case RowRule::kRowwiseAdagrad:
        return 1;
      case RowRule::kAdam:
        return 2 * dim_;
    }
    return 0;
  }

  // Floats of a sum of gradients.
  HETMPI_SHARED int64_t sum_dim() const {
    switch (rule_) {
      case RowRule::kSgd:
        return dim_;
      case RowRule::kRowwiseAdagrad:
        return dim_ + 1;
      case RowRule::kAdagrad:
      case RowRule::kAdam:
        return 2 * dim_;
    }
    return 0;
  }

  // Sets the learning rate of the following applications; `step` counts from 1.
  void set_step(double lr, int64_t step) {
    lr_ = static_cast<float>(lr);
    adam_lr_ = static_cast<float>(lr / (1.0 - std::pow(static_cast<double>(beta1_), step)));
    adam_scale_ = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(static_cast<double>(beta2_), step)));
  }

  // Whether add_and_apply is one addition and one subtraction per number, of `step` times the gradient.
  HETMPI_SHARED bool is_plain() const { return rule_ == RowRule::kSgd && weight_decay_ == 0; }
  HETMPI_SHARED float plain_step(float scale) const { return lr_ * scale; }

  // Adds one iteration's gradient to sums (sum_dim).
  template <typename Loop>
  HETMPI_SHARED void add(float* sums, const float* grad, Loop loop) const {
    const int64_t dim = dim_;
    loop.each(dim, [=](int64_t d) { sums[d] += grad[d]; });
    if (rule_ == RowRule::kSgd) return;
    float* squares = sums + dim;
    if (rule_ == RowRule::kRowwiseAdagrad) {
      const float mean = loop.sum(dim, [=](int64_t d) { return grad[d] * grad[d]; }) / static_cast<float>(dim);
      loop.set(squares, *squares + mean);
    } else {
      loop.each(dim, [=](int64_t d) { squares[d] += grad[d] * grad[d]; });
    }
  }

  // add() and apply() of one iteration's gradient, the latter scaled.
  template <typename Row, typename Loop>
  HETMPI_SHARED void add_and_apply(float* sums, Row weight, float* state, const float* grad, float scale,
                                   Loop loop) const {
    add(sums, grad, loop);
    apply(weight, state, {grad, nullptr, scale}, loop);
  }

  // The same on the CPU, in one pass if the rule allows.
  void add(float* sums, const float* grad) const {
    if (rule_ == RowRule::kSgd) return hetmpi::add(sums, grad, dim_);
    add(sums, grad, Serially());
  }

  void add_and_apply(float* sums, float* weight, float* state, const float* grad, float scale) const {
    if (is_plain()) return add_and_subtract(sums, weight, plain_step(scale), grad, dim_);
    add_and_apply(sums, weight, state, grad, scale, Serially());
  }

  void apply(float* weight, float* state, const Gradient& grad) const {
    if (is_plain()) return subtract(weight, plain_step(grad.scale), grad.sum, dim_);
    apply(weight, state, grad, Serially());
  }

  // A sum over `count` iterations, of which `advance` are new to the row, as a gradient; scaled by `scale`.
  HETMPI_SHARED Gradient summed(const float* sums, int64_t count, int64_t advance, float scale = 1) const {
    return {sums, rule_ == RowRule::kSgd ? nullptr : sums + dim_, scale, count, advance};
  }

  // weight (dim), a float* or a HalfRow (cache/row_type.h); state (state_dim): one row.
  template <typename Row, typename Loop>
  HETMPI_SHARED void apply(Row weight, float* state, const Gradient& grad, Loop loop) const {
    switch (rule_) {
      case RowRule::kSgd:
        return sgd(weight, grad, loop);
      case RowRule::kAdagrad:
        return adagrad(weight, state, grad, loop);
      case RowRule::kRowwiseAdagrad:
        return rowwise_adagrad(weight, state, grad, loop);
      case RowRule::kAdam:
        return adam(weight, state, grad, loop);
    }
  }

 private:
  // Sum of the scaled gradient and the row's decay at component d, and its square. If the two nearly cancel, rounding
  // could make a sum of squares negative, with NaN as its root.
  struct Terms {
    const float* sum;
    const float* squares;
    float scale, decay, decay_once, count;

    template <typename Row>
    HETMPI_SHARED float value(Row weight, int64_t d) const {
      return scale * sum[d] + decay * weight[d];
    }

    template <typename Row>
    HETMPI_SHARED float square(Row weight, int64_t d) const {
      const float g = scale * sum[d], once = decay_once * weight[d];
      if (squares == nullptr) return (g + once) * (g + once);
      return at_least_zero(scale * scale * squares[d] + 2 * once * g + count * once * once);
    }
  };

  HETMPI_SHARED Terms terms(const Gradient& grad) const {
    return {grad.sum,      grad.squares,
            grad.scale,    weight_decay_ * static_cast<float>(grad.advance),
            weight_decay_, static_cast<float>(grad.count)};
  }

  // The functions below copy all members except the row to locals: a store to the row could otherwise alias them, which
  // would prevent vectorisation.

  template <typename Row, typename Loop>
  HETMPI_SHARED void sgd(Row weight, const Gradient& grad, Loop loop) const {
    const float* sum = grad.sum;
    const float lr = lr_, scale = grad.scale, decay = weight_decay_ * static_cast<float>(grad.advance);
    if (decay == 0) {
      const float step = lr * scale;
      loop.each(dim_, [=](int64_t d) { weight[d] -= step * sum[d]; });
    } else {
      loop.each(dim_, [=](int64_t d) { weight[d] -= lr * (scale * sum[d] + decay * weight[d]); });
    }
  }

  template <typename Row, typename Loop>
  HETMPI_SHARED void adagrad(Row weight, float* sum, const Gradient& grad, Loop loop) const {
    const Terms g = terms(grad);
    const float lr = lr_, eps = eps_;
    loop.each(dim_, [=](int64_t d) {
      const float value = g.value(weight, d);
      sum[d] += g.square(weight, d);
      weight[d] -= lr * value / (std::sqrt(sum[d]) + eps);
    });
  }

  template <typename Row, typename Loop>
  HETMPI_SHARED void rowwise_adagrad(Row weight, float* sum, const Gradient& grad, Loop loop) const {
    const Terms g = terms(grad);
    const float before = *sum, total = before + mean_squares(g, weight, loop);
    loop.set(sum, total);
    const float factor = lr_ / (std::sqrt(total) + eps_);
    loop.each(dim_, [=](int64_t d) { weight[d] -= factor * g.value(weight, d); });
  }

  template <typename Row, typename Loop>
  HETMPI_SHARED float mean_squares(const Terms& g, Row weight, Loop loop) const {
    const float dim = static_cast<float>(dim_);
    if (g.squares == nullptr) return loop.sum(dim_, [=](int64_t d) { return g.square(weight, d); }) / dim;
    const float decays = loop.sum(dim_, [=](int64_t d) {
      const float once = g.decay_once * weight[d];
      return 2 * once * g.scale * g.sum[d] + g.count * once * once;
    });
    return at_least_zero(g.scale * g.scale * *g.squares + decays / dim);
  }

  // The moving averages use the mean gradient of the summed iterations, and decay by the number of new iterations.
  template <typename Row, typename Loop>
  HETMPI_SHARED void adam(Row weight, float* state, const Gradient& grad, Loop loop) const {
    const Terms g = terms(grad);
    float* mean = state;             // (dim)
    float* variance = state + dim_;  // (dim)
    const float keep1 = power(beta1_, grad.advance), keep2 = power(beta2_, grad.advance);
    const float take1 = (1 - power(beta1_, grad.count)) / g.count, take2 = (1 - power(beta2_, grad.count)) / g.count;
    const float lr = static_cast<float>(grad.advance) * adam_lr_, scale = adam_scale_, eps = eps_;
    loop.each(dim_, [=](int64_t d) {
      mean[d] = keep1 * mean[d] + take1 * g.value(weight, d);
      variance[d] = keep2 * variance[d] + take2 * g.square(weight, d);
      weight[d] -= lr * mean[d] / (std::sqrt(variance[d]) * scale + eps);
    });
  }

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
  float weight_decay_, beta1_, beta2_, eps_;
  float lr_ = 0, adam_lr_ = 0, adam_scale_ = 1;
};

}  // namespace hetmpi
