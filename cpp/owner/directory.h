// Directory: which row of its shard an owner has for a key. Other ranks know the owner of a key (partition.h), not its
// row.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "owner/partition.h"

namespace hetmpi {

class Directory {
 public:
  Directory(const Partition& partition, int64_t owner) : partition_(partition), owner_(owner) {}

  // rows (n) of keys (n). Throws std::out_of_range for a key that this owner does not have.
  void rows_of(const int64_t* keys, int64_t n, int64_t* rows) const {
    for (int64_t i = 0; i < n; ++i) {
      if (keys[i] < 0 || keys[i] >= partition_.num_rows()) refuse(keys[i]);
      const Place place = partition_.locate(keys[i]);
      if (place.owner != owner_) refuse(keys[i]);
      rows[i] = place.row;
    }
  }

 private:
  [[noreturn]] void refuse(int64_t key) const {
    throw std::out_of_range("rank " + std::to_string(owner_) + " does not own key " + std::to_string(key));
  }

  Partition partition_;
  int64_t owner_;
};

}  // namespace hetmpi
