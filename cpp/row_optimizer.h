// Row optimizers: what an owner does to one row when its gradients arrive.
//
// Each rule is the one torch.optim applies to a parameter, restricted to the touched row; weight decay is torch's
// (L2, added to the gradient). The bias correction of Adam counts the table's steps, as torch.optim.SparseAdam does.
// Row-wise Adagrad keeps one sum per row, of the mean squared gradient (Naumov et al. 2019, FBGEMM).
//
// Gradients may come as sums over several iterations of one rank (staleness s >= 1). Such a sum carries what the rule
// needs to act as if they had come one by one at the row as it is now:
//   sums (sum_dim): the gradients' sum (dim), then, except for sgd, the sum of their squares (dim; rowwise_adagrad: one
//   number, the mean over the row);
//   count     iterations summed;
//   advance   iterations that are news to the row: by how much the sum moves its clock. Other ranks' sums over the same
//             iterations bring their gradients but no second decay: of the weights, or of Adam's moving averages. Adam
//             moves a row only for iterations that are news; what the others bring shows in its averages.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

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

  int64_t dim() const { return dim_; }

  // Floats of state beside each row.
  int64_t state_dim() const {
    switch (rule_) {
      case RowRule::kSgd: return 0;
      case RowRule::kAdagrad: return dim_;
      case RowRule::kRowwiseAdagrad: return 1;
      case RowRule::kAdam: return 2 * dim_;
    }
    return 0;
  }

  // Floats of a sum of gradients.
  int64_t sum_dim() const {
    switch (rule_) {
      case RowRule::kSgd: return dim_;
      case RowRule::kRowwiseAdagrad: return dim_ + 1;
      case RowRule::kAdagrad:
      case RowRule::kAdam: return 2 * dim_;
    }
    return 0;
  }

  // Fixes the learning rate for the applications that follow; `step` counts from 1.
  void set_step(double lr, int64_t step) {
    lr_ = static_cast<float>(lr);
    adam_lr_ = static_cast<float>(lr / (1.0 - std::pow(static_cast<double>(beta1_), step)));
    adam_scale_ = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(static_cast<double>(beta2_), step)));
  }

  // Adds one iteration's gradient to sums (sum_dim).
  void add(float* __restrict sums, const float* __restrict grad) const {
    hetmpi::add(sums, grad, dim_);
    if (rule_ == RowRule::kSgd) return;
    const int64_t dim = dim_;
    float* __restrict squares = sums + dim;
    if (rule_ == RowRule::kRowwiseAdagrad) {
      float sum = 0;
      for (int64_t d = 0; d < dim; ++d) sum += grad[d] * grad[d];
      *squares += sum / static_cast<float>(dim);
    } else {
      for (int64_t d = 0; d < dim; ++d) squares[d] += grad[d] * grad[d];
    }
  }

  // add() and apply() of one iteration's gradient, the latter scaled: in one pass where the rule allows.
  void add_and_apply(float* __restrict sums, float* __restrict weight, float* state, const float* __restrict grad,
                     float scale) const {
    if (rule_ != RowRule::kSgd || weight_decay_ != 0) {
      add(sums, grad);
      return apply(weight, state, {grad, nullptr, scale});
    }
    add_and_subtract(sums, weight, lr_ * scale, grad, dim_);
  }

  // A sum over `count` iterations, of which `advance` are news to the row, as a gradient; scaled by `scale`.
  Gradient summed(const float* sums, int64_t count, int64_t advance, float scale = 1) const {
    return {sums, rule_ == RowRule::kSgd ? nullptr : sums + dim_, scale, count, advance};
  }

  // weight (dim), state (state_dim): one row.
  void apply(float* weight, float* state, const Gradient& grad) const {
    switch (rule_) {
      case RowRule::kSgd: return sgd(weight, grad);
      case RowRule::kAdagrad: return adagrad(weight, state, grad);
      case RowRule::kRowwiseAdagrad: return rowwise_adagrad(weight, state, grad);
      case RowRule::kAdam: return adam(weight, state, grad);
    }
  }

 private:
  // What a gradient, scaled, and the row's decay come to at component d, and their squares. Where the two all but
  // cancel, rounding could leave a sum of squares below 0, whose root is NaN.
  struct Terms {
    const float* sum;
    const float* squares;
    float scale, decay, decay_once, count;

    float value(const float* weight, int64_t d) const { return scale * sum[d] + decay * weight[d]; }

    float square(const float* weight, int64_t d) const {
      const float g = scale * sum[d], once = decay_once * weight[d];
      if (squares == nullptr) return (g + once) * (g + once);
      return std::max(scale * scale * squares[d] + 2 * once * g + count * once * once, 0.0f);
    }
  };

  Terms terms(const Gradient& grad) const {
    return {grad.sum, grad.squares, grad.scale, weight_decay_ * static_cast<float>(grad.advance), weight_decay_,
            static_cast<float>(grad.count)};
  }

  // In the loops below everything but the row is local: a store to the row could else change what the next turn reads,
  // and none would be vectorised.

  void sgd(float* __restrict weight, const Gradient& grad) const {
    const float* __restrict sum = grad.sum;
    const float lr = lr_, scale = grad.scale, decay = weight_decay_ * static_cast<float>(grad.advance);
    if (decay == 0) return subtract(weight, lr * scale, sum, dim_);
    const int64_t dim = dim_;
    for (int64_t d = 0; d < dim; ++d) weight[d] -= lr * (scale * sum[d] + decay * weight[d]);
  }

  void adagrad(float* __restrict weight, float* __restrict sum, const Gradient& grad) const {
    const Terms g = terms(grad);
    const float lr = lr_, eps = eps_;
    const int64_t dim = dim_;
    for (int64_t d = 0; d < dim; ++d) {
      const float value = g.value(weight, d);
      sum[d] += g.square(weight, d);
      weight[d] -= lr * value / (std::sqrt(sum[d]) + eps);
    }
  }

  void rowwise_adagrad(float* __restrict weight, float* __restrict sum, const Gradient& grad) const {
    const Terms g = terms(grad);
    const int64_t dim = dim_;
    *sum += mean_squares(g, weight);
    const float factor = lr_ / (std::sqrt(*sum) + eps_);
    for (int64_t d = 0; d < dim; ++d) weight[d] -= factor * g.value(weight, d);
  }

  float mean_squares(const Terms& g, const float* weight) const {
    float sum = 0;
    if (g.squares == nullptr) {
      for (int64_t d = 0; d < dim_; ++d) sum += g.square(weight, d);
      return sum / static_cast<float>(dim_);
    }
    for (int64_t d = 0; d < dim_; ++d) {
      const float once = g.decay_once * weight[d];
      sum += 2 * once * g.scale * g.sum[d] + g.count * once * once;
    }
    return std::max(g.scale * g.scale * *g.squares + sum / static_cast<float>(dim_), 0.0f);
  }

  // The moving averages take the mean gradient of the iterations summed, and fade by the iterations that are news.
  void adam(float* __restrict weight, float* __restrict state, const Gradient& grad) const {
    const Terms g = terms(grad);
    const int64_t dim = dim_;
    float* __restrict mean = state;            // (dim)
    float* __restrict variance = state + dim;  // (dim)
    const float keep1 = power(beta1_, grad.advance), keep2 = power(beta2_, grad.advance);
    const float take1 = (1 - power(beta1_, grad.count)) / g.count, take2 = (1 - power(beta2_, grad.count)) / g.count;
    const float lr = static_cast<float>(grad.advance) * adam_lr_, scale = adam_scale_, eps = eps_;
    for (int64_t d = 0; d < dim; ++d) {
      mean[d] = keep1 * mean[d] + take1 * g.value(weight, d);
      variance[d] = keep2 * variance[d] + take2 * g.square(weight, d);
      weight[d] -= lr * mean[d] / (std::sqrt(variance[d]) * scale + eps);
    }
  }

  static float power(float base, int64_t exponent) {
    return exponent == 1 ? base : static_cast<float>(std::pow(static_cast<double>(base), static_cast<double>(exponent)));
  }

  RowRule rule_;
  int64_t dim_;
  float weight_decay_, beta1_, beta2_, eps_;
  float lr_ = 0, adam_lr_ = 0, adam_scale_ = 1;
};

}  // namespace hetmpi
