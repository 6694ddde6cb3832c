// Keys: the keys of a call with all that depends on them alone. Immutable.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "buffer.h"
#include "client/lines.h"
#include "owner/route.h"

namespace hetmpi {

// The keys of a table, as one rank sees them.
struct KeySpace {
  Partition partition;
  int64_t rank;
  std::vector<uint8_t> is_remote, is_admitted;  // ranks of other nodes; ranks whose rows may be cached
  Lines* lines;                                 // read the keys
};

struct Keys {
  Buffer<int64_t> array;                                          // (n)
  std::shared_ptr<const void> identity;                           // of their batch; null for none
  std::shared_ptr<const Route> route, local_route, remote_route;  // all, those of this node, those of other nodes
  std::vector<uint8_t> is_remote;                                 // (n): of other nodes
  Buffer<uint8_t> is_admitted;                                    // (n): that may be cached
  int64_t num_admitted;
  bool are_fixed = false;  // whether those of the batch stay as they are

  // keys (n). Throws std::out_of_range for a key that is not in the table.
  Keys(const KeySpace& space, const int64_t* keys, int64_t n, std::shared_ptr<const void> identity)
      : array(space.lines->empty<int64_t>(n)),
        identity(std::move(identity)),
        route(std::make_shared<const Route>(space.partition, keys, n)),
        is_remote(n),
        is_admitted(space.lines->empty<uint8_t>(n)) {
    std::copy_n(keys, n, array.data());
    route->owned_by(space.is_remote.data(), is_remote.data());
    route->owned_by(space.is_admitted.data(), is_admitted.data());
    num_admitted = std::count(is_admitted.begin(), is_admitted.end(), 1);
    const int64_t num_remote = std::count(is_remote.begin(), is_remote.end(), 1);
    std::vector<uint8_t> is_local(n);
    for (int64_t i = 0; i < n; ++i) is_local[i] = !is_remote[i];
    local_route = num_remote == 0 ? route : std::make_shared<const Route>(route->where(is_local.data()));
    remote_route = num_remote == n ? route : std::make_shared<const Route>(route->where(is_remote.data()));
  }

  int64_t size() const { return array.size(); }

  bool has_values(const int64_t* values, int64_t n) const {
    return array.size() == n && std::equal(array.begin(), array.end(), values);
  }

  // Whether they identify the same batch, with the same values.
  bool are_those_of(const Keys& other) const {
    return this == &other ||
           (identity && identity == other.identity && has_values(other.array.data(), other.array.size()));
  }
};

using KeysOfCall = std::shared_ptr<const Keys>;

// The keys that were checked last, at most `most`. Used by one thread at a time.
class RecentKeys {
 public:
  explicit RecentKeys(size_t most) : most_(most) {}

  void set_most(size_t most) { most_ = most; }

  void add(std::shared_ptr<Keys> keys) {
    ++num_added_;
    kept_.push_back(std::move(keys));
    while (kept_.size() > most_) {
      const auto oldest = std::move(kept_.front());
      kept_.pop_front();  // before its end, which may run code that adds keys
    }
  }

  int64_t num_added() const { return num_added_; }

  std::vector<std::shared_ptr<Keys>> of_batch(const void* identity) const {
    std::vector<std::shared_ptr<Keys>> found;
    for (const auto& keys : kept_)
      if (keys->identity.get() == identity) found.push_back(keys);
    return found;
  }

 private:
  size_t most_;
  int64_t num_added_ = 0;
  std::deque<std::shared_ptr<Keys>> kept_;
};

}  // namespace hetmpi
