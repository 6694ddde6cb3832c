// What the clients of both consistency models, exact.h and bounded.h, use of their table.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "buffer.h"
#include "client/keys.h"
#include "client/lines.h"
#include "counters.h"
#include "owner/node_rows.h"
#include "owner/ring.h"
#include "spans.h"
#include "wire/exchange.h"
#include "wire/ring_writer.h"

namespace hetmpi {

constexpr size_t kMostAhead = 4;  // batches announced and not read yet

// Arrays of a row, as owners have them.
constexpr size_t kWeight = 0, kMeanSquare = 1;

// All outlives the client.
struct Table {
  const KeySpace* space;
  const NodeRows* node;
  Channel* channel;
  Lines* lines;
  Spans* spans;
  Counters* counters;
  std::vector<RingProducer*> rings;  // of each rank: to another owner of this node, else null

  int64_t rank() const { return space->rank; }
  Waits& waits() const { return channel->exchange->waits(); }

  // As of NodeRows, with the bytes counted. may_interleave: a simulation lets other ranks run there.
  void read_clocks(const Route& route, int32_t* out) const {
    spans->may_interleave();
    counters->clock_bytes += node->read_clocks(route, out);
    spans->may_interleave();
  }
  void read(size_t array, const Route& route, float* out) const {
    spans->may_interleave();
    counters->row_bytes += node->read(array, route, out);
    spans->may_interleave();
  }
};

// Throws std::runtime_error if so many announced batches are the maximum.
inline void check_room(size_t num_ahead) {
  if (num_ahead == kMostAhead)
    throw std::runtime_error("EmbeddingTable.prefetch: " + std::to_string(kMostAhead) +
                             " batches, the maximum, are announced and not read yet: read one before the next call");
}

// Writes a push into the rings of the owners on this node; waits while one is full.
inline void send_on_node(const Table& table, const Push& push) {
  table.spans->may_interleave();
  RingWriter writer(table.rings, push);
  table.waits().wait([&writer] { return writer.proceed(); },
                     [&] {
                       return Awaited{
                           "in step " + std::to_string(push.step + 1) + " for {} to make room for its gradients",
                           writer.full()};
                     });
  table.counters->push_bytes +=
      push.bytes_elsewhere(table.channel->format, table.rank(), table.space->partition.size());
}

// Copies the owners' rows, for evaluation, to out (n, dim). step: as of fetch().
inline void peek(const Table& table, const Keys& keys, int64_t step, float* out) {
  table.node->read(kWeight, *keys.route, out);
  fetch(*table.channel, keys.remote_route, step, out);
}

}  // namespace hetmpi
