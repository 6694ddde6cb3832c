// The producer's end of a ring on numpy arrays.
#pragma once

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "owner/ring.h"
#include "python/arrays.h"
#include "python/bindings.h"
#include "python/owner_arrays.h"

namespace hetmpi {

// The producer's end of one ring; the caller keeps its arrays alive (py::keep_alive in ring.cpp).
class Producer {
 public:
  Producer(Array<uint8_t> data, RecordFormat format)
      : ring_(data.mutable_data(), data.size(), format), format_(format) {}

  int64_t write(int64_t step, const Array<int64_t>& rows, const Array<float>& values, const Array<int64_t>& order,
                const std::optional<Array<int32_t>>& clocks, const std::optional<Array<int32_t>>& counts,
                const std::optional<Array<int32_t>>& steps, int64_t begin, bool is_last) {
    const ssize_t n = rows.shape(0);
    if (begin < 0 || begin > n) throw std::out_of_range("begin must lie in [0, " + std::to_string(n) + "]");
    Message message = message_of(rows, values, order, clocks, counts, steps, format_);
    message.rows += begin;
    const int64_t* position = order.data() + begin;
    py::gil_scoped_release release;
    return ring_.write(step, message, position, n - begin, is_last);
  }

  RingProducer& core() { return ring_; }
  uint64_t head() const { return ring_.head(); }
  uint64_t tail() const { return ring_.tail(); }
  void set_tail(uint64_t tail) { ring_.set_tail(tail); }

 private:
  RingProducer ring_;
  RecordFormat format_;
};

inline RingHeader* ring_header(Array<uint8_t>& memory) {
  if (memory.size() < static_cast<ssize_t>(sizeof(RingHeader)))
    throw std::invalid_argument("a ring needs at least " + std::to_string(sizeof(RingHeader)) + " bytes");
  return reinterpret_cast<RingHeader*>(memory.mutable_data());
}

}  // namespace hetmpi
