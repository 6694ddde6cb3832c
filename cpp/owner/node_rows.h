// NodeRows: the shards of all owners of a node, read in the memory that they share. A row of another rank may be read
// while it is written, which s >= 1 accepts (docs/sharp_bits.md).
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "owner/directory.h"
#include "owner/push_applier.h"
#include "owner/route.h"
#include "owner/row_file.h"
#include "owner/shard.h"
#include "vectors.h"

namespace hetmpi {

// A shard as other ranks read it.
struct NodeShard {
  const int32_t* clock;              // (num_rows)
  std::vector<const float*> arrays;  // (num_rows, dims[a]) of each array of a row
  const Directory* directory;
  const RowFile* file = nullptr;  // has the first of the arrays, which is null then
};

class NodeRows {
 public:
  // shards: of the owners of the node, which are `ranks`, ascending; dims: numbers of each array of a row. applier:
  // writes the shard of rank `own` while others read; null at s = 0, where no read overlaps the apply of a step.
  NodeRows(std::vector<NodeShard> shards, std::vector<int64_t> ranks, int64_t own, std::vector<int64_t> dims,
           PushApplier* applier)
      : shards_(std::move(shards)), ranks_(std::move(ranks)), own_(own), dims_(std::move(dims)), applier_(applier) {}

  size_t size() const { return shards_.size(); }
  const NodeShard& shard(size_t owner) const { return shards_.at(owner); }
  const std::vector<int64_t>& dims() const { return dims_; }
  PushApplier* applier() const { return applier_; }

  // Reads the clocks of the route's keys that this node owns, to their positions in out (n). Returns the bytes of all
  // keys of the route that other ranks own.
  int64_t read_clocks(const Route& route, int32_t* out) const {
    for (size_t owner = 0; owner < size(); ++owner) {
      const auto [rows, position] = rows_of(route, owner);
      const int32_t* clock = shards_[owner].clock;
      for (size_t i = 0; i < rows.size(); ++i) {
        if (i + kAhead < rows.size()) __builtin_prefetch(clock + rows[i + kAhead]);
        out[position[i]] = load_clock(clock + rows[i]);
      }
    }
    return route.num_elsewhere(own_) * sizeof(int32_t);
  }

  // As read_clocks() for an array of the rows, to out (n, dims[array]).
  int64_t read(size_t array, const Route& route, float* out) const {
    const int64_t dim = dims_.at(array);
    for (size_t owner = 0; owner < size(); ++owner) {
      const auto [rows, position] = rows_of(route, owner);
      if (rows.empty()) continue;
      if (array == 0 && shards_[owner].file != nullptr) shards_[owner].file->want(rows.data(), rows.size());
      exclusively(owner, [&, &rows = rows, position = position] {
        copy(owner, array, rows, [=](size_t i) { return out + position[i] * dim; });
      });
    }
    return route.num_elsewhere(own_) * dim * sizeof(float);
  }

  // Copies an array of `rows` (n) of an owner, the i-th to to(i) (dims[array]).
  template <typename To>
  void copy(size_t owner, size_t array, const std::vector<int64_t>& rows, To to) const {
    const NodeShard& shard = shards_[owner];
    const int64_t dim = dims_[array], num_bytes = sizeof(float) * dim;
    if (array == 0 && shard.file != nullptr) {
      std::vector<float> scratch(dim);
      for (size_t i = 0; i < rows.size(); ++i) std::memcpy(to(i), shard.file->read(rows[i], scratch.data()), num_bytes);
      return;
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i + kAhead < rows.size()) prefetch_read(shard.arrays[array] + rows[i + kAhead] * dim, dim);
      std::memcpy(to(i), shard.arrays[array] + rows[i] * dim, num_bytes);
    }
  }

  // Runs `reads` while an owner's shard is not written, if this rank is that owner.
  template <typename Reads>
  void exclusively(size_t owner, Reads reads) const {
    if (applier_ != nullptr && ranks_[owner] == own_)
      applier_->exclusively(reads);
    else
      reads();
  }

 private:
  static constexpr size_t kAhead = 16;  // rows prefetched: a shard is far larger than the caches

  // An owner's rows of a route's keys, until the next call of this thread, and the keys' positions.
  std::pair<const std::vector<int64_t>&, const int64_t*> rows_of(const Route& route, size_t owner) const {
    static thread_local std::vector<int64_t> rows;
    const RouteView view = route.view();
    const int64_t rank = ranks_[owner], begin = view.first[rank];
    rows.resize(view.num(rank));
    if (!rows.empty()) shards_[owner].directory->rows_of(view.keys + begin, rows.size(), rows.data());
    return {rows, view.order + begin};
  }

  std::vector<NodeShard> shards_;
  std::vector<int64_t> ranks_;
  int64_t own_;
  std::vector<int64_t> dims_;
  PushApplier* applier_;
};

}  // namespace hetmpi
