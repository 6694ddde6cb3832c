// Keys: the keys of a call with all that depends on them alone. Immutable.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "owner/route.h"

namespace hetmpi {

struct Keys {
  std::shared_ptr<const Route> route, local_route, remote_route;  // all, those of this node, those of other nodes
  std::vector<uint8_t> is_remote, is_admitted;                    // (n): of other nodes; that may be cached

  // keys (n); ranks on other nodes, and ranks whose rows may be cached: masks (size). Throws std::out_of_range for a
  // key that is not in the table.
  Keys(const Partition& partition, const int64_t* keys, int64_t n, const uint8_t* remote_ranks,
       const uint8_t* admitted_ranks)
      : route(std::make_shared<const Route>(partition, keys, n)), is_remote(n), is_admitted(n) {
    route->held_by(remote_ranks, is_remote.data());
    route->held_by(admitted_ranks, is_admitted.data());
    const int64_t num_remote = std::count(is_remote.begin(), is_remote.end(), 1);
    std::vector<uint8_t> is_local(n);
    for (int64_t i = 0; i < n; ++i) is_local[i] = !is_remote[i];
    local_route = num_remote == 0 ? route : std::make_shared<const Route>(route->where(is_local.data()));
    remote_route = num_remote == n ? route : std::make_shared<const Route>(route->where(is_remote.data()));
  }
};

}  // namespace hetmpi
