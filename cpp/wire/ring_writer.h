// RingWriter: a rank's gradients of one step on their way into the rings of their owners (ring.h), as far as these have
// room.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "owner/ring.h"
#include "wire/request.h"

namespace hetmpi {

class RingWriter {
 public:
  // rings: to each rank, null where nothing is to be written. push: the gradients for all ranks; if it ends the step, a
  // ring without rows gets an empty record.
  RingWriter(std::vector<RingProducer*> rings, Push push) : rings_(std::move(rings)), push_(std::move(push)) {
    for (size_t rank = 0; rank < rings_.size(); ++rank)
      if (rings_[rank] && (push_.ends_step || push_.route.num(rank) > 0)) left_.push_back({rank, 0});
  }

  // Writes what fits. Returns true once all is written.
  bool proceed() {
    size_t num_left = 0;
    for (Part& part : left_)
      if (!write(part)) left_[num_left++] = part;
    left_.resize(num_left);
    return num_left == 0;
  }

  // The ranks whose rings lack room, ascending.
  std::vector<int64_t> full() const {
    std::vector<int64_t> ranks;
    for (const Part& part : left_) ranks.push_back(part.rank);
    return ranks;
  }

 private:
  struct Part {
    size_t rank;
    int64_t num_written;  // rows
  };

  // Writes records of a part until all of it is written, and returns true, or until its ring is full.
  bool write(Part& part) {
    const int64_t begin = push_.route.first[part.rank], num_rows = push_.route.num(part.rank);
    return write_rest(num_rows, &part.num_written, [&](int64_t num_left) {
      PushColumns from = push_.columns;
      from.keys = push_.route.keys + begin + part.num_written;
      const int64_t* order = push_.route.order + begin + part.num_written;
      return rings_[part.rank]->write(push_.step, from, order, num_left, push_.ends_step);
    });
  }

  std::vector<RingProducer*> rings_;
  Push push_;
  std::vector<Part> left_;
};

}  // namespace hetmpi
