// Sampler: the sampled neighbourhoods of a batch of heads, hop by hop from the heads outwards.
//
// The draws of a node are a pure function of (seed, stream, window, node), where the window is a head's position in its
// stream divided by kWindow. The k-th draw is the same whatever the fan-out and the hop. So what a head reads depends
// on its position alone, not on the other heads of a batch, and a node that is reached again within a window needs no
// new neighbours.
//
//   with replacement     draw k takes edge floor(word(k) * degree / 2^64) of the node
//   without replacement  the draws are the first places of a Fisher-Yates shuffle of the node's edges: draw k takes one
//                        of the degree - k edges that are left
//
// Words are hashes after splitmix64, as in hetmpi/data/synthetic.py.
//
// Invariants:
//   nodes() begins with the heads, duplicates included; all further (window, node) pairs are distinct;
//   a pair is numbered by its first place in nodes();
//   shuffled_[i] == i between calls of draw().
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "key_index.h"

namespace hetmpi {

// Neighbours of all nodes: those of node v are indices[indptr[v]], ..., indices[indptr[v + 1] - 1].
template <typename Index>
struct Adjacency {
  const int64_t* indptr;  // (num_nodes + 1)
  const Index* indices;   // (num_edges)
  int64_t num_nodes, num_edges;
};

// Sampled neighbours of the first nodes of a batch: those of node i are nodes()[index[j]], offsets[i] <= j < offsets[i
// + 1].
struct Block {
  std::vector<int64_t> offsets, index;
};

// Numbers keys by a place given with them. Open addressing over a power-of-two table, at most half full.
class PlaceIndex {
 public:
  void clear() {
    slots_.assign(std::max<size_t>(slots_.size(), 1024), Slot{-1, 0});
    size_ = 0;
  }

  HETMPI_PREFETCHES void prefetch(int64_t key) const { __builtin_prefetch(&slots_[first_slot(key)], 1); }

  // The place of `key`, which is `next` if the key is new.
  int64_t place(int64_t key, int64_t next) {
    if (2 * (size_ + 1) > slots_.size()) grow();
    Slot* slot = find(key);
    if (slot->key < 0) {
      *slot = {key, next};
      ++size_;
    }
    return slot->place;
  }

 private:
  struct Slot {
    int64_t key, place;  // key -1: empty
  };

  size_t first_slot(int64_t key) const { return mix64(static_cast<uint64_t>(key)) & (slots_.size() - 1); }

  Slot* find(int64_t key) {
    size_t at = first_slot(key);
    while (slots_[at].key >= 0 && slots_[at].key != key) at = (at + 1) & (slots_.size() - 1);
    return &slots_[at];
  }

  void grow() {
    std::vector<Slot> old(2 * slots_.size(), Slot{-1, 0});
    old.swap(slots_);
    for (const Slot& slot : old)
      if (slot.key >= 0) *find(slot.key) = slot;
  }

  std::vector<Slot> slots_;
  size_t size_ = 0;
};

// Its memory is kept between batches.
class Sampler {
 public:
  static constexpr int64_t kWindow = 4096;

  // Samples one block per fan-out for heads (n) at `positions` (n) of a stream. Throws std::out_of_range for a head, a
  // neighbour or an offset outside the graph.
  template <typename Index>
  void sample(const Adjacency<Index>& graph, const int64_t* heads, const int64_t* positions, int64_t n,
              const std::vector<int64_t>& fanouts, bool with_replacement, uint64_t seed, uint64_t stream) {
    start(graph.num_nodes, heads, positions, n, mix64(mix64(seed) + kGolden * (stream + 1)));
    blocks_.assign(fanouts.size(), Block());
    for (size_t hop = 0; hop < fanouts.size(); ++hop) add_hop(graph, fanouts[hop], with_replacement, &blocks_[hop]);
  }

  // Of the last sample; may be moved away.
  std::vector<int64_t>& nodes() { return nodes_; }
  std::vector<Block>& blocks() { return blocks_; }

 private:
  static constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ULL;
  static constexpr int64_t kChunk = 32;  // nodes whose memory is requested together

  struct Edge {
    int64_t place;   // in indices
    int32_t window;  // of the node that drew it
  };

  void start(int64_t num_nodes, const int64_t* heads, const int64_t* positions, int64_t n, uint64_t base) {
    nodes_.assign(heads, heads + n);
    window_of_.resize(n);
    words_.clear();
    windows_.clear(16);
    seen_.clear();
    for (int64_t i = 0; i < n; ++i) {
      check_in(heads[i], num_nodes, "heads");
      const int64_t window = positions[i] / kWindow;
      window_of_[i] = windows_.number(window);
      if (window_of_[i] == static_cast<int64_t>(words_.size()))
        words_.push_back(mix64(static_cast<uint64_t>(window) * kGolden + base));
      seen_.place(window_of_[i] * num_nodes + heads[i], i);
    }
  }

  // In each chunk of nodes, offsets are requested from memory, then the drawn edges, then their slots in the index:
  // waiting for each in turn takes most of the time otherwise.
  template <typename Index>
  void add_hop(const Adjacency<Index>& graph, int64_t fanout, bool with_replacement, Block* block) {
    const auto num_targets = static_cast<int64_t>(nodes_.size());
    block->offsets.assign(1, 0);
    block->offsets.reserve(num_targets + 1);
    block->index.reserve(num_targets * std::min(fanout, kChunk));
    for (int64_t begin = 0; begin < num_targets; begin += kChunk) {
      const int64_t end = std::min(begin + kChunk, num_targets);
      for (int64_t i = end; i < std::min(end + kChunk, num_targets); ++i) __builtin_prefetch(graph.indptr + nodes_[i]);
      edges_.clear();
      for (int64_t i = begin; i < end; ++i) {
        draw(graph, i, fanout, with_replacement);
        block->offsets.push_back(static_cast<int64_t>(block->index.size() + edges_.size()));
      }
      keys_.resize(edges_.size());
      for (size_t j = 0; j < edges_.size(); ++j) {
        const int64_t neighbour = graph.indices[edges_[j].place];
        check_in(neighbour, graph.num_nodes, "indices");
        keys_[j] = edges_[j].window * graph.num_nodes + neighbour;
        seen_.prefetch(keys_[j]);
      }
      const size_t first = block->index.size();
      block->index.resize(first + edges_.size());
      int64_t* index = block->index.data() + first;
      for (size_t j = 0; j < edges_.size(); ++j) index[j] = number(keys_[j], edges_[j].window, graph.num_nodes);
    }
  }

  // Adds the drawn edges of node i to edges_, and requests their neighbours from memory.
  template <typename Index>
  void draw(const Adjacency<Index>& graph, int64_t i, int64_t fanout, bool with_replacement) {
    const int64_t node = nodes_[i], first = graph.indptr[node], last = graph.indptr[node + 1], degree = last - first;
    if (first < 0 || first > last || last > graph.num_edges)
      throw std::out_of_range("indptr must rise from 0 to " + std::to_string(graph.num_edges) + ", got " +
                              std::to_string(first) + ", " + std::to_string(last) + " for node " +
                              std::to_string(node));
    const uint64_t word = mix64(static_cast<uint64_t>(node) * kGolden + words_[window_of_[i]]);
    const int64_t count = degree == 0 ? 0 : with_replacement ? fanout : std::min(fanout, degree);
    if (!with_replacement) reserve_shuffle(degree);
    for (int64_t k = 0; k < count; ++k) {
      const uint64_t random = mix64(word + (k + 1) * kGolden);
      const int64_t edge = with_replacement ? below(random, degree) : shuffle(k, k + below(random, degree - k));
      edges_.push_back({first + edge, window_of_[i]});
      __builtin_prefetch(graph.indices + first + edge);
    }
    if (!with_replacement) undo_shuffle(count);
  }

  int64_t number(int64_t key, int32_t window, int64_t num_nodes) {
    const auto next = static_cast<int64_t>(nodes_.size());
    const int64_t place = seen_.place(key, next);
    if (place == next) {
      nodes_.push_back(key - window * num_nodes);
      window_of_.push_back(window);
    }
    return place;
  }

  // A number in [0, limit) that is uniform if random is.
  static int64_t below(uint64_t random, int64_t limit) {
    return static_cast<int64_t>((static_cast<unsigned __int128>(random) * static_cast<uint64_t>(limit)) >> 64);
  }

  void reserve_shuffle(int64_t degree) {
    const auto known = static_cast<int64_t>(shuffled_.size());
    if (degree <= known) return;
    shuffled_.resize(std::max(degree, 2 * known));
    std::iota(shuffled_.begin() + known, shuffled_.end(), known);
  }

  // Exchanges the numbers at places k <= j, and returns the one that is now at k.
  int64_t shuffle(int64_t k, int64_t j) {
    exchanged_.push_back(j);
    std::swap(shuffled_[k], shuffled_[j]);
    return shuffled_[k];
  }

  void undo_shuffle(int64_t count) {
    for (int64_t k = count - 1; k >= 0; --k) std::swap(shuffled_[k], shuffled_[exchanged_[k]]);
    exchanged_.clear();
  }

  static void check_in(int64_t node, int64_t num_nodes, const char* name) {
    if (node < 0 || node >= num_nodes)
      throw std::out_of_range(std::string(name) + " must lie in [0, " + std::to_string(num_nodes) + "), got " +
                              std::to_string(node));
  }

  std::vector<int64_t> nodes_;      // (N)
  std::vector<int32_t> window_of_;  // (N) number of a node's window in the batch
  std::vector<Block> blocks_;
  std::vector<uint64_t> words_;  // hash of each window
  KeyIndex windows_;
  PlaceIndex seen_;  // window * num_nodes + node -> first place in nodes_
  std::vector<Edge> edges_;
  std::vector<int64_t> keys_, shuffled_, exchanged_;
};

// Lists of `rows` (n), those of row i being values[offsets[i]], ..., values[offsets[i + 1] - 1], one after the other in
// `out` (out_offsets[n]). REQUIRES: out_offsets (n + 1) are the sums of the lists' sizes.
template <typename Value>
void gather_lists(const int64_t* offsets, const Value* values, const int64_t* rows, int64_t n,
                  const int64_t* out_offsets, int64_t* out) {
  constexpr int64_t kAhead = 8;  // lists requested from memory: all lists are far larger than the caches
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(values + offsets[rows[i + kAhead]]);
    std::copy_n(values + offsets[rows[i]], out_offsets[i + 1] - out_offsets[i], out + out_offsets[i]);
  }
}

}  // namespace hetmpi
