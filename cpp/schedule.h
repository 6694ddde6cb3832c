// The learning-rate schedule of rows and dense layers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace hetmpi {

// Factor of the learning rates over steps: a linear warm-up over warmup_steps, then constant, or a fall to `floor` at
// total_steps, linear or as half a cosine, or decay to the power of `drops`, the times that a metric stayed on a
// plateau.
struct Schedule {
  enum class Kind { kConstant, kLinear, kCosine, kPlateau };

  Kind kind = Kind::kConstant;
  int64_t warmup_steps = 0, total_steps = 0;
  double floor = 0.0, decay = 0.5;
  int64_t drops = 0;

  // At a step, counted from 0.
  double factor(int64_t step) const {
    if (step < warmup_steps) return static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
    if (kind == Kind::kConstant || kind == Kind::kPlateau) return std::pow(decay, static_cast<double>(drops));
    const auto length = static_cast<double>(std::max<int64_t>(1, total_steps - warmup_steps));
    const double done = std::min(1.0, static_cast<double>(step - warmup_steps) / length);
    constexpr double kPi = 3.141592653589793;
    const double fall = kind == Kind::kLinear ? 1.0 - done : 0.5 * (1.0 + std::cos(kPi * done));
    return floor + (1.0 - floor) * fall;
  }
};

}  // namespace hetmpi
