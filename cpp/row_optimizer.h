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
  void add(float* sums, const float* grad) const {
    for (int64_t d = 0; d < dim_; ++d) sums[d] += grad[d];
    if (rule_ == RowRule::kSgd) return;
    float* squares = sums + dim_;
    if (rule_ == RowRule::kRowwiseAdagrad) {
      float sum = 0;
      for (int64_t d = 0; d < dim_; ++d) sum += grad[d] * grad[d];
      *squares += sum / static_cast<float>(dim_);
    } else {
      for (int64_t d = 0; d < dim_; ++d) squares[d] += grad[d] * grad[d];
    }
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
  void sgd(float* weight, const Gradient& grad) const {
    const float decay = weight_decay_ * static_cast<float>(grad.advance);
    for (int64_t d = 0; d < dim_; ++d) weight[d] -= lr_ * (grad.scale * grad.sum[d] + decay * weight[d]);
  }

  // Sum of the squared gradients of component d, weight decay included.
  float squares(const Gradient& grad, const float* weight, int64_t d) const {
    const float g = grad.scale * grad.sum[d], decay = weight_decay_ * weight[d];
    if (grad.squares == nullptr) return (g + decay) * (g + decay);
    return grad.scale * grad.scale * grad.squares[d] + 2 * decay * g + static_cast<float>(grad.count) * decay * decay;
  }

  void adagrad(float* weight, float* sum, const Gradient& grad) const {
    const float decay = weight_decay_ * static_cast<float>(grad.advance);
    for (int64_t d = 0; d < dim_; ++d) {
      const float g = grad.scale * grad.sum[d] + decay * weight[d];
      sum[d] += squares(grad, weight, d);
      weight[d] -= lr_ * g / (std::sqrt(sum[d]) + eps_);
    }
  }

  void rowwise_adagrad(float* weight, float* sum, const Gradient& grad) const {
    const float decay = weight_decay_ * static_cast<float>(grad.advance);
    *sum += mean_squares(grad, weight);
    const float factor = lr_ / (std::sqrt(*sum) + eps_);
    for (int64_t d = 0; d < dim_; ++d) weight[d] -= factor * (grad.scale * grad.sum[d] + decay * weight[d]);
  }

  float mean_squares(const Gradient& grad, const float* weight) const {
    float sum = 0;
    if (grad.squares == nullptr) {
      for (int64_t d = 0; d < dim_; ++d) sum += squares(grad, weight, d);
      return sum / static_cast<float>(dim_);
    }
    for (int64_t d = 0; d < dim_; ++d) {
      const float decay = weight_decay_ * weight[d];
      sum += 2 * decay * grad.scale * grad.sum[d] + static_cast<float>(grad.count) * decay * decay;
    }
    return grad.scale * grad.scale * *grad.squares + sum / static_cast<float>(dim_);
  }

  // The moving averages take the mean gradient of the iterations summed, and fade by the iterations that are news.
  void adam(float* weight, float* state, const Gradient& grad) const {
    float* mean = state;             // (dim)
    float* variance = state + dim_;  // (dim)
    const float keep1 = power(beta1_, grad.advance), keep2 = power(beta2_, grad.advance);
    const float count = static_cast<float>(grad.count), advance = static_cast<float>(grad.advance);
    const float take1 = (1 - power(beta1_, grad.count)) / count, take2 = (1 - power(beta2_, grad.count)) / count;
    const float decay = weight_decay_ * advance;
    for (int64_t d = 0; d < dim_; ++d) {
      mean[d] = keep1 * mean[d] + take1 * (grad.scale * grad.sum[d] + decay * weight[d]);
      variance[d] = keep2 * variance[d] + take2 * squares(grad, weight, d);
      weight[d] -= advance * adam_lr_ * mean[d] / (std::sqrt(variance[d]) * adam_scale_ + eps_);
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
