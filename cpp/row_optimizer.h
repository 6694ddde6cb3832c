// Row optimizers: what an owner does to one row when its gradient arrives.
//
// Each rule is the one torch.optim applies to a parameter, restricted to the touched row; weight decay is torch's
// (L2, added to the gradient). The bias correction of Adam counts the table's steps, as torch.optim.SparseAdam does.
// Row-wise Adagrad keeps one sum per row, of the mean squared gradient (Naumov et al. 2019, FBGEMM).
#pragma once

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

class RowOptimizer {
 public:
  RowOptimizer(const std::string& rule, int64_t dim, float weight_decay, float beta1, float beta2, float eps)
      : rule_(row_rule(rule)), dim_(dim), weight_decay_(weight_decay), beta1_(beta1), beta2_(beta2), eps_(eps) {
    if (dim < 1) throw std::invalid_argument("dim must be at least 1, got " + std::to_string(dim));
  }

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

  // Fixes the learning rate for the applications that follow; `step` counts from 1.
  void set_step(double lr, int64_t step) {
    lr_ = static_cast<float>(lr);
    adam_lr_ = static_cast<float>(lr / (1.0 - std::pow(static_cast<double>(beta1_), step)));
    adam_scale_ = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(static_cast<double>(beta2_), step)));
  }

  // weight (dim), state (state_dim), grad (dim): one row.
  void apply(float* weight, float* state, const float* grad) const {
    switch (rule_) {
      case RowRule::kSgd: return sgd(weight, grad);
      case RowRule::kAdagrad: return adagrad(weight, state, grad);
      case RowRule::kRowwiseAdagrad: return rowwise_adagrad(weight, state, grad);
      case RowRule::kAdam: return adam(weight, state, grad);
    }
  }

 private:
  float decayed(const float* weight, const float* grad, int64_t d) const { return grad[d] + weight_decay_ * weight[d]; }

  void sgd(float* weight, const float* grad) const {
    for (int64_t d = 0; d < dim_; ++d) weight[d] -= lr_ * decayed(weight, grad, d);
  }

  void adagrad(float* weight, float* sum, const float* grad) const {
    for (int64_t d = 0; d < dim_; ++d) {
      const float g = decayed(weight, grad, d);
      sum[d] += g * g;
      weight[d] -= lr_ * g / (std::sqrt(sum[d]) + eps_);
    }
  }

  void rowwise_adagrad(float* weight, float* sum, const float* grad) const {
    float squares = 0;
    for (int64_t d = 0; d < dim_; ++d) squares += decayed(weight, grad, d) * decayed(weight, grad, d);
    *sum += squares / static_cast<float>(dim_);
    const float scale = lr_ / (std::sqrt(*sum) + eps_);
    for (int64_t d = 0; d < dim_; ++d) weight[d] -= scale * decayed(weight, grad, d);
  }

  void adam(float* weight, float* state, const float* grad) const {
    float* mean = state;             // (dim)
    float* variance = state + dim_;  // (dim)
    for (int64_t d = 0; d < dim_; ++d) {
      const float g = decayed(weight, grad, d);
      mean[d] += (1 - beta1_) * (g - mean[d]);
      variance[d] += (1 - beta2_) * (g * g - variance[d]);
      weight[d] -= adam_lr_ * mean[d] / (std::sqrt(variance[d]) * adam_scale_ + eps_);
    }
  }

  RowRule rule_;
  int64_t dim_;
  float weight_decay_, beta1_, beta2_, eps_;
  float lr_ = 0, adam_lr_ = 0, adam_scale_ = 1;
};

}  // namespace hetmpi
