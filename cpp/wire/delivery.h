// Delivery: a rank's gradients of one step on their way into the rings of their owners (ring.h), as far as these have
// room.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "owner/ring.h"
#include "wire/round.h"

namespace hetmpi {

class Delivery {
 public:
  // rings: of each rank; one without a producer is not written, one without a header is a mirror, whose bytes and head
  // the caller copies. push: the gradients for all ranks; if it ends the step, a ring without rows gets an empty
  // record.
  Delivery(std::vector<NodeRing> rings, PushView push) : rings_(std::move(rings)), push_(push) {
    for (size_t rank = 0; rank < rings_.size(); ++rank)
      if (rings_[rank].producer && (push_.ends_step || push_.route.num(rank) > 0)) left_.push_back({rank, 0});
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
    const NodeRing& ring = rings_[part.rank];
    const int64_t begin = push_.route.first[part.rank], num_rows = push_.route.num(part.rank);
    if (ring.header) ring.producer->set_tail(ring.header->tail.load(std::memory_order_acquire));
    int64_t written = 0;
    do {
      Message from = push_.columns;
      from.keys = push_.route.keys + begin + part.num_written;
      const int64_t* order = push_.route.order + begin + part.num_written;
      written = ring.producer->write(push_.step, from, order, num_rows - part.num_written, true);
      part.num_written += std::max<int64_t>(written, 0);
    } while (written >= 0 && part.num_written < num_rows);
    if (ring.header) ring.header->head.store(ring.producer->head(), std::memory_order_release);
    return written >= 0;
  }

  std::vector<NodeRing> rings_;
  PushView push_;
  std::vector<Part> left_;
};

}  // namespace hetmpi
