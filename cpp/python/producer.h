// The producer's end of a ring on numpy arrays.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "owner/ring.h"
#include "python/arrays.h"
#include "python/bindings.h"

namespace hetmpi {

// The producer's end of one ring; the caller keeps its arrays alive (py::keep_alive in ring.cpp).
class Producer {
 public:
  Producer(Array<uint8_t> data, RecordFormat format) : ring_(data.mutable_data(), data.size(), format) {}

  RingProducer& core() { return ring_; }
  uint64_t head() const { return ring_.head(); }
  uint64_t tail() const { return ring_.tail(); }
  void set_tail(uint64_t tail) { ring_.set_tail(tail); }

 private:
  RingProducer ring_;
};

inline RingHeader* ring_header(Array<uint8_t>& memory) {
  if (memory.size() < static_cast<ssize_t>(sizeof(RingHeader)))
    throw std::invalid_argument("a ring needs at least " + std::to_string(sizeof(RingHeader)) + " bytes");
  return reinterpret_cast<RingHeader*>(memory.mutable_data());
}

}  // namespace hetmpi
