// Round: what a rank asks of the owners on one other node, and their reply, for one table (hetmpi/wire/rounds.py). The
// request goes to one rank of that node, its server, which shares memory with all owners there: it writes their rings
// and reads their shards.
//
// request   RequestHeader; OwnerCounts of each owner of the node; then for each owner the records pushed to it
//           (cpp/owner/ring.h), keys (n) int64, and if the request judges, the clocks of the requester's copies (n)
//           int32
// reply     for each owner, if the request judges, the clocks (n) int32 of the requested keys; then of the m rows that
//           the requester wants, by is_wanted(), or of all, each array of a row: weight (m, dim) float32, ...
//
// Every array is padded to whole words of 8 bytes. Owners are in the order of their ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cache/cache_decisions.h"
#include "owner/push_applier.h"
#include "owner/ring.h"
#include "owner/shard.h"

namespace hetmpi {

struct RequestHeader {
  int64_t reason;  // why rows are requested, the same on all ranks in a round; kPushes for a request without reply
  int64_t bound;   // staleness, for requests that judge
  int64_t step;    // for others: steps that the rows must have
};
constexpr int64_t kPushes = -1;

struct OwnerCounts {
  int64_t num_records;
  int64_t num_keys;  // requested
};

constexpr int64_t kWord = sizeof(int64_t);
inline int64_t whole_words(int64_t bytes) { return (bytes + kWord - 1) / kWord * kWord; }

// HET's second condition, c_g <= c_c + s, evaluated at owner and requester alike: whether the reply has the row.
// known: c_c of the requester's line, kNoLine without one; clock: c_g.
inline bool is_wanted(int32_t known, int32_t clock, int64_t bound) {
  return known == kNoLine || (bound != kUnbounded && clock > int64_t{known} + bound);
}

// Keys by owner (hetmpi/owner/route.py, Route): those of owner o are keys[first[o]] .. keys[first[o + 1] - 1].
struct RouteView {
  const int64_t* order;
  const int64_t* keys;
  const int64_t* first;

  int64_t num(int64_t owner) const { return first[owner + 1] - first[owner]; }
};

// Gradients to push; their columns are by position, as route.order.
struct PushView {
  int64_t step;
  RouteView route;
  Message columns;  // keys unused
  bool ends_step;   // every owner gets a record, the last one of this step
};

// The requester's side of one round: writes requests and reads replies.
class RoundRequest {
 public:
  // pull: the keys requested; known (n): clocks of this rank's copies, by position, null if the request does not judge.
  // dims: numbers of each array of a row, in the order of a reply.
  RoundRequest(RouteView pull, const int32_t* known, RequestHeader header, std::vector<PushView> pushes,
               RecordFormat format, std::vector<int64_t> dims)
      : pull_(pull),
        known_(known),
        header_(header),
        pushes_(std::move(pushes)),
        format_(format),
        dims_(std::move(dims)) {}

  // Bytes of the request to these owners.
  int64_t bytes(const std::vector<int64_t>& owners) const {
    int64_t total = sizeof(RequestHeader) + owners.size() * sizeof(OwnerCounts);
    for (const int64_t owner : owners) {
      for (const PushView& push : pushes_) total += record_bytes(push, owner);
      total += kWord * pull_.num(owner);
      if (known_) total += whole_words(sizeof(int32_t) * pull_.num(owner));
    }
    return total;
  }

  void write(const std::vector<int64_t>& owners, uint8_t* at) const {
    std::memcpy(at, &header_, sizeof(header_));
    auto* counts = reinterpret_cast<OwnerCounts*>(at + sizeof(header_));
    at = reinterpret_cast<uint8_t*>(counts + owners.size());
    for (const int64_t owner : owners) {
      *counts = {0, pull_.num(owner)};
      for (const PushView& push : pushes_) {
        const int64_t num_bytes = write_record(push, owner, at);
        if (num_bytes == 0) continue;
        at += num_bytes;
        ++counts->num_records;
      }
      const int64_t begin = pull_.first[owner], n = pull_.num(owner);
      std::copy_n(pull_.keys + begin, n, reinterpret_cast<int64_t*>(at));
      at += kWord * n;
      ++counts;
      if (known_ == nullptr) continue;
      auto* known = reinterpret_cast<int32_t*>(at);
      for (int64_t i = 0; i < n; ++i) known[i] = known_[pull_.order[begin + i]];
      at += whole_words(sizeof(int32_t) * n);
    }
  }

  // Reads the clocks in a reply of these owners, and which rows it has: to versions and fetched (n), by position.
  // Returns the bytes read; throws std::out_of_range if the reply is shorter.
  int64_t read_clocks(const std::vector<int64_t>& owners, const uint8_t* reply, int64_t size, int32_t* versions,
                      bool* fetched) const {
    int64_t at = 0;
    for (const int64_t owner : owners) {
      const int64_t n = pull_.num(owner), *order = pull_.order + pull_.first[owner];
      const auto* clocks = reinterpret_cast<const int32_t*>(reply + at);
      at += whole_words(sizeof(int32_t) * n);
      check_end(at, size);
      int64_t num_wanted = 0;
      for (int64_t i = 0; i < n; ++i) {
        const bool wanted = is_wanted(known_[order[i]], clocks[i], header_.bound);
        versions[order[i]] = clocks[i];
        fetched[order[i]] = wanted;
        num_wanted += wanted;
      }
      for (const int64_t dim : dims_) at += whole_words(sizeof(float) * num_wanted * dim);
      check_end(at, size);
    }
    return at;
  }

  // Copies the rows in a reply, after read_clocks if the request judges, to their positions: outs[a] (n, dims[a]) for
  // each array of a row. Throws std::out_of_range if the reply to a request that does not judge is shorter.
  void place(const std::vector<int64_t>& owners, const uint8_t* reply, int64_t size,
             const std::vector<float*>& outs) const {
    const uint8_t* const end = reply + size;
    for (const int64_t owner : owners) {
      const int64_t n = pull_.num(owner), *order = pull_.order + pull_.first[owner];
      const auto* clocks = reinterpret_cast<const int32_t*>(reply);
      if (known_) reply += whole_words(sizeof(int32_t) * n);
      for (size_t a = 0; a < dims_.size(); ++a) {
        const auto* value = reinterpret_cast<const float*>(reply);
        int64_t num_wanted = 0;
        if (known_ == nullptr) check_end(whole_words(sizeof(float) * n * dims_[a]), end - reply);
        for (int64_t i = 0; i < n; ++i) {
          if (known_ && !is_wanted(known_[order[i]], clocks[i], header_.bound)) continue;
          std::memcpy(outs[a] + order[i] * dims_[a], value, sizeof(float) * dims_[a]);
          value += dims_[a];
          ++num_wanted;
        }
        reply += whole_words(sizeof(float) * num_wanted * dims_[a]);
      }
    }
  }

  static void check_end(int64_t at, int64_t size) {
    if (at > size) throw std::out_of_range("round: a message is shorter than its contents");
  }

 private:
  int64_t record_bytes(const PushView& push, int64_t owner) const {
    const int64_t n = push.route.num(owner);
    if (n == 0 && !push.ends_step) return 0;
    const int64_t* order = push.route.order + push.route.first[owner];
    int64_t total = sizeof(RecordHeader);
    for (int64_t i = 0; i < n; ++i) total += push.columns.row_bytes(order[i], format_);
    return whole_words(total);
  }

  // Returns the bytes of the record, 0 if the owner gets none.
  int64_t write_record(const PushView& push, int64_t owner, uint8_t* at) const {
    const int64_t num_bytes = record_bytes(push, owner);
    if (num_bytes == 0) return 0;
    const int64_t begin = push.route.first[owner], n = push.route.num(owner);
    *reinterpret_cast<RecordHeader*>(at) = {static_cast<uint64_t>(num_bytes), push.step, n, push.ends_step};
    Message from = push.columns;
    from.keys = push.route.keys + begin;
    write_columns(columns_of(at, n, format_), from, push.route.order + begin, n, format_);
    return num_bytes;
  }

  RouteView pull_;
  const int32_t* known_;
  RequestHeader header_;
  std::vector<PushView> pushes_;
  RecordFormat format_;
  std::vector<int64_t> dims_;
};

// A shard in this node's memory, as a server reads it.
struct NodeShard {
  const int32_t* clock;              // (num_rows)
  std::vector<const float*> arrays;  // (num_rows, dims[a]) of each array of a row, numbers of 4 bytes
  const Directory* directory;
};

// The producer's end of a ring in the memory of an owner of this node; or of a mirror, without a header (delivery.h).
struct NodeRing {
  RingHeader* header = nullptr;
  RingProducer* producer = nullptr;  // null: there is no such ring

  bool is_drained() const {
    return producer == nullptr || header->tail.load(std::memory_order_acquire) == producer->head();
  }
};

// The side of the owners of a node, which one of them, the server, takes for the requests of some other ranks, its
// clients.
class RoundServer {
 public:
  using Rings = std::vector<NodeRing>;  // of each owner of the node

  // shards: of each owner of the node in rank order. owners: to which of them each client's requests go. rings: for
  // each client, those of the first, second, ... record to an owner; with one entry only, those of all clients, or of
  // all records. judges: whether requests do. applier: applies pushes to the shard of `own`, this rank, without a ring;
  // null: no shard is excepted. applied: the steps that each owner has applied; empty where pushes are applied one by
  // one.
  RoundServer(PushApplier* applier, int64_t own, std::vector<NodeShard> shards,
              std::vector<std::vector<int64_t>> owners, std::vector<std::vector<Rings>> rings, RecordFormat format,
              std::vector<int64_t> dims, bool judges, std::vector<const int64_t*> applied = {})
      : applier_(applier),
        own_(own),
        shards_(std::move(shards)),
        owners_(std::move(owners)),
        rings_(std::move(rings)),
        format_(format),
        dims_(std::move(dims)),
        judges_(judges),
        applied_(std::move(applied)) {}

  // Takes the request of a client, whose memory must stay until apply() returns true and the reply is written. Throws
  // std::out_of_range, and takes nothing, if its contents exceed it or it asks for keys of others. Keys of pushes are
  // checked when they are applied.
  void take(size_t client, const uint8_t* request, int64_t size) {
    Request taken = parsed(client, request, size);
    if (header_of(request, size).reason != kPushes) requests_.push_back(std::move(taken));
  }

  // Applies the pushes of all requests taken to this rank's shard, and passes on those to other owners. Returns false
  // if a ring is full: to be called again. Meanwhile records for other rings have gone on: an owner may wait for them
  // before it makes room.
  bool apply() {
    std::vector<const RingProducer*> full;
    size_t num_left = 0;
    for (PushedRecord& record : pushed_) {
      if (is_own(record)) {
        applier_->apply(record.columns, record.header->num_rows);
        continue;
      }
      const NodeRing& ring = ring_of(record);
      const bool is_behind = std::find(full.begin(), full.end(), ring.producer) != full.end();
      if (!is_behind && pass_on(ring, record)) continue;
      full.push_back(ring.producer);
      pushed_[num_left++] = record;
    }
    pushed_.resize(num_left);
    return num_left == 0;
  }

  // Whether the owners have applied what the requests taken must see: so many steps, or everything passed on to them.
  bool is_applied() const {
    if (!applied_.empty())
      return std::all_of(requests_.begin(), requests_.end(), [&](const Request& of) { return has_applied(of.step); });
    for (const auto& of_client : rings_)
      for (const Rings& of_record : of_client)
        for (const NodeRing& ring : of_record)
          if (!ring.is_drained()) return false;
    return true;
  }

  // Whether the owners of the node have applied so many steps.
  bool has_applied(int64_t step) const {
    return std::all_of(applied_.begin(), applied_.end(),
                       [step](const int64_t* of) { return __atomic_load_n(of, __ATOMIC_ACQUIRE) >= step; });
  }

  // The request of one client, of which there is at most one: whether its reply can be made; true without a request.
  bool is_ready(int64_t client) const {
    const Request* request = request_of(client);
    if (request == nullptr) return true;
    return applied_.empty() ? pushed_.empty() && is_applied() : has_applied(request->step);
  }

  // Its reply is made in three steps.
  int64_t reply_bytes(int64_t client) {
    Request* request = request_of(client);
    return request == nullptr ? 0 : bytes_of(*request);
  }
  void write_reply_to(int64_t client, uint8_t* at) const {
    const Request* request = request_of(client);
    if (request != nullptr) write(*request, at);
  }
  void forget(int64_t client) {
    const auto is_its = [client](const Request& request) { return request.client == client; };
    requests_.erase(std::remove_if(requests_.begin(), requests_.end(), is_its), requests_.end());
  }

  // Reads the clocks of the rows that all requests taken ask for, and returns the bytes of each reply.
  std::vector<int64_t> reply_bytes() {
    std::vector<int64_t> sizes;
    for (Request& request : requests_) sizes.push_back(bytes_of(request));
    return sizes;
  }

  // Writes the reply to the i-th request taken.
  void write_reply(size_t i, uint8_t* at) const { write(requests_.at(i), at); }

  // Forgets the requests taken, but not their pushes.
  void clear() { requests_.clear(); }

  static RequestHeader header_of(const uint8_t* request, int64_t size) {
    RoundRequest::check_end(sizeof(RequestHeader), size);
    return *reinterpret_cast<const RequestHeader*>(request);
  }

 private:
  struct Pull {
    int64_t owner;
    std::vector<int64_t> rows;  // requested
    const int32_t* known;
    std::vector<int32_t> clocks;
    std::vector<int64_t> wanted;  // those of the rows that the reply has
  };
  struct PushedRecord {
    size_t client;
    int64_t owner, number;  // the record is the number-th one to its owner
    const RecordHeader* header;
    RecordColumns columns;
    int64_t num_passed;  // rows
  };
  struct Request {
    int64_t client, bound, step;
    std::vector<Pull> pulls;  // of each owner
  };

  const Request* request_of(int64_t client) const {
    for (const Request& request : requests_)
      if (request.client == client) return &request;
    return nullptr;
  }
  Request* request_of(int64_t client) { return const_cast<Request*>(std::as_const(*this).request_of(client)); }

  // Reads the clocks that the reply has.
  int64_t bytes_of(Request& request) const {
    int64_t total = 0;
    for (Pull& pull : request.pulls) {
      pull.clocks.resize(pull.rows.size());
      pull.wanted.clear();
      for (size_t j = 0; j < pull.rows.size(); ++j) {
        const int64_t row = pull.rows[j];
        if (judges_)
          pull.clocks[j] = load_clock(shards_[pull.owner].clock + row);  // before the rows, which must not be older
        if (!judges_ || is_wanted(pull.known[j], pull.clocks[j], request.bound)) pull.wanted.push_back(row);
      }
      if (judges_) total += whole_words(sizeof(int32_t) * pull.rows.size());
      for (const int64_t dim : dims_) total += whole_words(sizeof(float) * pull.wanted.size() * dim);
    }
    return total;
  }

  void write(const Request& request, uint8_t* at) const {
    for (const Pull& pull : request.pulls) {
      if (judges_) {
        std::copy(pull.clocks.begin(), pull.clocks.end(), reinterpret_cast<int32_t*>(at));
        at += whole_words(sizeof(int32_t) * pull.rows.size());
      }
      const auto copy = [&] { at = copy_rows(shards_[pull.owner], pull.wanted, at); };
      if (applier_ && pull.owner == own_)
        applier_->exclusively(copy);
      else
        copy();  // may see a row while its owner writes it (docs/sharp_bits.md)
    }
  }

  bool is_own(const PushedRecord& record) const { return applier_ && record.owner == own_; }

  const NodeRing& ring_of(const PushedRecord& record) const {
    const auto& of_client = rings_.size() == 1 ? rings_[0] : rings_.at(record.client);
    return (of_client.size() == 1 ? of_client[0] : of_client.at(record.number)).at(record.owner);
  }

  void check_ring(const PushedRecord& record) const {
    if (!is_own(record) && ring_of(record).producer == nullptr)
      throw std::out_of_range("round: a message pushes to an owner that its sender cannot reach");
  }

  // Reads a request, and adds its records to those to be applied.
  Request parsed(size_t client, const uint8_t* request, int64_t size) {
    const RequestHeader header = header_of(request, size);
    Request found{static_cast<int64_t>(client), header.bound, header.step, {}};
    const auto* counts = reinterpret_cast<const OwnerCounts*>(request + sizeof(RequestHeader));
    int64_t at = sizeof(RequestHeader) + owners_.at(client).size() * sizeof(OwnerCounts);
    RoundRequest::check_end(at, size);
    std::vector<PushedRecord> records;
    for (const int64_t owner : owners_[client]) {
      for (int64_t i = 0; i < counts->num_records; ++i) {
        const Record record = record_at(request + at, size - at, format_);
        records.push_back({client, owner, i, record.header, record.columns, 0});
        check_ring(records.back());
        at += record.header->bytes;
      }
      const int64_t n = counts->num_keys;
      if (n < 0 || n > (size - at) / kWord) throw std::out_of_range("round: a message is shorter than its contents");
      const auto* keys = reinterpret_cast<const int64_t*>(request + at);
      const auto* known = reinterpret_cast<const int32_t*>(request + at + kWord * n);
      at += kWord * n;
      if (judges_) at += whole_words(sizeof(int32_t) * n);
      RoundRequest::check_end(at, size);
      Pull& pull = found.pulls.emplace_back(Pull{owner, std::vector<int64_t>(n), known, {}, {}});
      shards_[owner].directory->rows_of(keys, n, pull.rows.data());
      ++counts;
    }
    pushed_.insert(pushed_.end(), records.begin(), records.end());
    return found;
  }

  // Writes the rest of a record into an owner's ring. Returns false if the ring is full.
  bool pass_on(const NodeRing& ring, PushedRecord& record) {
    const int64_t num_rows = record.header->num_rows;
    ring.producer->set_tail(ring.header->tail.load(std::memory_order_acquire));
    bool is_whole = false;
    while (!is_whole) {
      const int64_t num_left = num_rows - record.num_passed;
      const int64_t written =
          ring.producer->write(record.header->step, columns_from(record.columns, record.num_passed, format_), num_left,
                               record.header->is_last);
      if (written < 0) break;
      record.num_passed += written;
      is_whole = record.num_passed == num_rows && (written > 0 || num_rows == 0);
    }
    ring.header->head.store(ring.producer->head(), std::memory_order_release);
    return is_whole;
  }

  uint8_t* copy_rows(const NodeShard& shard, const std::vector<int64_t>& rows, uint8_t* at) const {
    constexpr size_t kAhead = 8;  // rows prefetched: a shard is far larger than the caches
    for (size_t a = 0; a < dims_.size(); ++a) {
      const int64_t dim = dims_[a], num_bytes = sizeof(float) * dim;
      for (size_t j = 0; j < rows.size(); ++j) {
        if (j + kAhead < rows.size()) __builtin_prefetch(shard.arrays[a] + rows[j + kAhead] * dim);
        std::memcpy(at + j * num_bytes, shard.arrays[a] + rows[j] * dim, num_bytes);
      }
      at += whole_words(num_bytes * rows.size());
    }
    return at;
  }

  PushApplier* applier_;
  int64_t own_;
  std::vector<NodeShard> shards_;
  std::vector<std::vector<int64_t>> owners_;  // of each client
  std::vector<std::vector<Rings>> rings_;
  RecordFormat format_;
  std::vector<int64_t> dims_;
  bool judges_;
  std::vector<const int64_t*> applied_;
  std::vector<Request> requests_;
  std::vector<PushedRecord> pushed_;  // not applied or passed on yet
};

}  // namespace hetmpi
