// The owners' side of a table's messages on numpy arrays, which the caller keeps alive (py::keep_alive in round.cpp).
#pragma once

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "python/arrays.h"
#include "python/bindings.h"
#include "python/push_applier.h"
#include "python/wire_arrays.h"
#include "wire/round.h"

namespace hetmpi {

using Owners = std::vector<std::vector<int64_t>>;  // of each node

// The part of a message for one table: words [begin, end) of an int64 array.
using Section = std::tuple<Array<int64_t>, int64_t, int64_t>;

struct Bytes {
  const uint8_t* at;
  int64_t size;
};

inline Bytes bytes_of(const Section& section) {
  const auto& [message, begin, end] = section;
  if (begin < 0 || begin > end || end > message.shape(0))
    throw std::out_of_range("round: a section exceeds its message");
  return {reinterpret_cast<const uint8_t*>(message.data() + begin), (end - begin) * kWord};
}

inline std::vector<Bytes> all_bytes(const std::vector<Section>& sections) {
  std::vector<Bytes> found;
  for (const Section& section : sections) found.push_back(bytes_of(section));
  return found;
}

inline uint8_t* place_in(Array<int64_t>& message, int64_t begin, int64_t num_bytes) {
  if (begin < 0 || begin * kWord + num_bytes > message.nbytes())
    throw std::out_of_range("round: a section exceeds its message");
  return reinterpret_cast<uint8_t*>(message.mutable_data() + begin);
}

struct ShardArrays {
  Array<int32_t> clock;
  std::vector<Array<float>> arrays;  // of a row
  const Directory* directory;
};

class PyRoundServer {
 public:
  using Rings = std::vector<std::optional<RingArrays>>;  // None where there is none

  PyRoundServer(PyPushApplier* applier, int64_t own, const std::vector<ShardArrays>& shards, const Owners& owners,
                const std::vector<std::vector<Rings>>& rings, RecordFormat format, bool judges,
                const std::vector<Array<int64_t>>& applied)
      : core_(applier ? &applier->core() : nullptr, own, views(shards), checked(owners, shards.size()), views(rings),
              format, dims_of(shards.at(own)), judges, numbers(applied)) {}

  // The reason of each request. clients: which of the clients sent it.
  std::vector<int64_t> take(const std::vector<int64_t>& clients, const std::vector<Section>& requests) {
    std::vector<int64_t> reasons;
    for (size_t i = 0; i < requests.size(); ++i) {
      const Bytes request = bytes_of(requests[i]);
      reasons.push_back(RoundServer::header_of(request.at, request.size).reason);
      core_.take(clients.at(i), request.at, request.size);
    }
    return reasons;
  }

  bool apply() {
    py::gil_scoped_release release;
    return core_.apply();
  }

  bool is_applied() const { return core_.is_applied(); }
  bool has_applied(int64_t step) const { return core_.has_applied(step); }

  std::vector<int64_t> reply_words() {
    py::gil_scoped_release release;
    std::vector<int64_t> sizes = core_.reply_bytes();
    for (int64_t& size : sizes) size /= kWord;
    return sizes;
  }

  void write_replies(std::vector<Array<int64_t>> messages, const std::vector<int64_t>& begins,
                     const std::vector<int64_t>& words) {
    std::vector<uint8_t*> places;
    for (size_t i = 0; i < words.size(); ++i)
      places.push_back(place_in(messages.at(i), begins.at(i), words[i] * kWord));
    py::gil_scoped_release release;
    for (size_t i = 0; i < places.size(); ++i) core_.write_reply(i, places[i]);
    core_.clear();
  }

  RoundServer& core() { return core_; }

 private:
  static std::vector<int64_t> dims_of(const ShardArrays& shard) {
    std::vector<int64_t> dims;
    for (const auto& array : shard.arrays) dims.push_back(array.shape(1));
    return dims;
  }

  static std::vector<const int64_t*> numbers(const std::vector<Array<int64_t>>& arrays) {
    std::vector<const int64_t*> found;
    for (const auto& array : arrays) found.push_back(array.data());
    return found;
  }

  static std::vector<NodeShard> views(const std::vector<ShardArrays>& shards) {
    std::vector<NodeShard> found;
    for (const ShardArrays& shard : shards) {
      std::vector<const float*> arrays;
      for (const auto& array : shard.arrays) {
        check_shape(array, "array", {shard.clock.shape(0), -1});
        arrays.push_back(array.data());
      }
      found.push_back({shard.clock.data(), arrays, shard.directory});
    }
    return found;
  }

  static const Owners& checked(const Owners& owners, size_t num_shards) {
    for (const auto& of_client : owners) check_in(of_client.data(), of_client.size(), num_shards, "owners");
    return owners;
  }

  static std::vector<std::vector<RoundServer::Rings>> views(const std::vector<std::vector<Rings>>& rings) {
    std::vector<std::vector<RoundServer::Rings>> found;
    for (const auto& of_client : rings) {
      found.emplace_back();
      for (const Rings& of_record : of_client) {
        RoundServer::Rings& views = found.back().emplace_back();
        for (const auto& ring : of_record) views.push_back(ring ? ring->view() : NodeRing{});
      }
    }
    return found;
  }

  RoundServer core_;
};

}  // namespace hetmpi
