// What the ranks of a node ask of ranks on other nodes, or send them, merged by one of them, the collector of those
// ranks (hetmpi/comm/rails.py): a row that several ranks read crosses the network once, and the sum of their gradients.
//
// The ranks write to each other in memory that they share (hetmpi/comm/board.py), in words of 8 bytes:
//   pull    first (num_ranks + 1), keys by owner (round.h, RouteView)
//   push    first (num_ranks + 1), keys, gradients (n, dim) float32
//   reply   for each rank, where its places begin, and their end; the places (n) int32, padded to a whole word; rows
//           (m, width) float32: the places of a rank are those of its rows, by owner, of the owners of this collector
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "key_index.h"
#include "owner/rank_sums.h"
#include "wire/round.h"

namespace hetmpi {

struct Words {
  const int64_t* at;
  int64_t size;
};

// The keys of a pull or push by owner, and what stands behind them.
struct BoardRoute {
  const int64_t *first, *keys;
  const uint8_t* rest;

  // item_bytes: of each key behind the keys. Throws std::out_of_range if the message is shorter than its contents.
  BoardRoute(Words message, int64_t num_ranks, int64_t item_bytes) : first(message.at), keys(first + num_ranks + 1) {
    RoundRequest::check_end(num_ranks + 1, message.size);
    const int64_t n = first[num_ranks];
    RoundRequest::check_end((num_ranks + 1 + n) * kWord + whole_words(n * item_bytes), message.size * kWord);
    rest = reinterpret_cast<const uint8_t*>(keys + n);
  }

  static int64_t words(int64_t num_ranks, int64_t n, int64_t item_bytes) {
    return num_ranks + 1 + n + whole_words(n * item_bytes) / kWord;
  }

  int64_t num(int64_t owner) const { return first[owner + 1] - first[owner]; }
};

// Distinct keys by owner, as RouteView.
struct MergedKeys {
  std::vector<int64_t> keys, first;

  // owners: of the keys, ascending. Calls begin(owner) for each of these, which adds its keys, and sets `first`.
  template <typename Begin>
  void fill(const std::vector<int64_t>& owners, int64_t num_ranks, Begin begin) {
    first.assign(num_ranks + 1, 0);
    for (const int64_t owner : owners) {
      const auto before = static_cast<int64_t>(keys.size());
      begin(owner);
      first[owner + 1] = static_cast<int64_t>(keys.size()) - before;
    }
    for (int64_t rank = 0; rank < num_ranks; ++rank) first[rank + 1] += first[rank];
  }
};

// The rows that the ranks of a node pull from a collector's owners.
class NodePull {
 public:
  // messages: the pulls of the node's ranks. owners: those of this collector, ascending.
  NodePull(const std::vector<Words>& messages, const std::vector<int64_t>& owners, int64_t num_ranks)
      : places_(messages.size()) {
    std::vector<BoardRoute> routes;
    for (const Words& message : messages) routes.emplace_back(message, num_ranks, 0);
    static thread_local KeyIndex index;
    merged_.fill(owners, num_ranks, [&](int64_t owner) {
      const auto base = static_cast<int32_t>(merged_.keys.size());
      int64_t most = 0;
      for (const BoardRoute& route : routes) most += route.num(owner);
      index.clear(most);
      for (size_t i = 0; i < routes.size(); ++i) {
        const auto use = [&](int64_t, int32_t number) {
          places_[i].push_back(base + number);
          return true;
        };
        index.number_each(routes[i].keys + routes[i].first[owner], routes[i].num(owner), use);
      }
      merged_.keys.insert(merged_.keys.end(), index.keys().begin(), index.keys().end());
    });
  }

  const MergedKeys& merged() const { return merged_; }

  // Words of the reply before the rows.
  int64_t head_words() const {
    int64_t num_places = 0;
    for (const auto& places : places_) num_places += static_cast<int64_t>(places.size());
    return static_cast<int64_t>(places_.size()) + 1 + whole_words(sizeof(int32_t) * num_places) / kWord;
  }

  // Writes the reply's head_words().
  void write_head(int64_t* at) const {
    auto* places = reinterpret_cast<int32_t*>(at + places_.size() + 1);
    int64_t end = *at = 0;
    for (const auto& of_rank : places_) {
      std::copy(of_rank.begin(), of_rank.end(), places + end);
      *++at = end += static_cast<int64_t>(of_rank.size());
    }
  }

 private:
  MergedKeys merged_;
  std::vector<std::vector<int32_t>> places_;  // of each rank's rows
};

// Copies the rows that rank number `place` of the node pulled from a collector, from its reply to out (n, width), at
// the positions `order` of its route. owners: those of the collector, ascending.
inline void place_reply(Words reply, int64_t num_messages, int64_t place, const std::vector<int64_t>& owners,
                        const int64_t* order, const int64_t* first, float* out, int64_t width) {
  RoundRequest::check_end(num_messages + 1, reply.size);
  const int64_t num_bytes = sizeof(float) * width, num_places = reply.at[num_messages];
  const auto* places = reinterpret_cast<const int32_t*>(reply.at + num_messages + 1);
  const int64_t head = num_messages + 1 + whole_words(sizeof(int32_t) * num_places) / kWord;
  RoundRequest::check_end(head, reply.size);
  const auto* rows = reinterpret_cast<const float*>(reply.at + head);
  const int64_t num_rows = (reply.size - head) * kWord / num_bytes;
  int64_t next = reply.at[place];
  const int64_t end = reply.at[place + 1];
  for (const int64_t owner : owners) {
    for (int64_t i = first[owner]; i < first[owner + 1]; ++i, ++next) {
      if (next >= end || places[next] >= num_rows) throw std::out_of_range("board: a reply lacks rows");
      std::memcpy(out + order[i] * width, rows + places[next] * width, num_bytes);
    }
  }
}

// The gradients that the ranks of a block push to a collector's owners: one sum per row.
class NodePush {
 public:
  // messages: the pushes of the ranks from ranks.first on. Their gradients must outlive this object.
  NodePush(const std::vector<Words>& messages, RankBlock ranks, const std::vector<int64_t>& owners, int64_t num_ranks,
           int64_t dim)
      : dim_(dim) {
    std::vector<BoardRoute> routes;
    for (const Words& message : messages) routes.emplace_back(message, num_ranks, sizeof(float) * dim);
    sums_.begin(dim, ranks.last + 1);
    static thread_local KeyIndex index;
    merged_.fill(owners, num_ranks, [&](int64_t owner) {
      const int64_t base = sums_.size();
      index.clear(routes.front().num(owner) * 2);
      for (size_t i = 0; i < routes.size(); ++i) {
        const int64_t begin = routes[i].first[owner], rank = ranks.first + static_cast<int64_t>(i);
        const auto* grads = reinterpret_cast<const float*>(routes[i].rest) + begin * dim;
        index.number_each(routes[i].keys + begin, routes[i].num(owner), [&](int64_t j, int32_t number) {
          sums_.add(base + number, {rank, rank}, grads + j * dim, true);
          return true;
        });
      }
      merged_.keys.insert(merged_.keys.end(), index.keys().begin(), index.keys().end());
    });
  }

  const MergedKeys& merged() const { return merged_; }

  // Copies the sums to out (n, dim), in the order of the merged rows.
  void write_sums(float* out) {
    for (int64_t i = 0; i < sums_.size(); ++i) std::copy_n(sums_.sum(i), dim_, out + i * dim_);
  }

 private:
  int64_t dim_;
  MergedKeys merged_;
  RankSums sums_;
};

}  // namespace hetmpi
