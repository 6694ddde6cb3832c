// What a rank asks of the owners on one other node, and their reply, for one table: a section of a message
// (exchange.h). The request goes to one rank of that node, its server, which shares memory with all owners there: it
// writes their rings and reads their shards.
//
// request   RequestHeader; OwnerCounts of each owner of the node; then for each owner the records pushed to it
//           (cpp/owner/ring.h), keys (n) int64, and if the request has clocks, the clocks of the requester's copies (n)
//           int32
// reply     for each owner, if the request has clocks, the clocks (n) int32 of the requested keys; then each array of
//           the m rows that it has (with clocks: by must_send(), otherwise all n): weight (m, dim) float32, ...
//
// Every array is padded to whole words of 8 bytes. Owners are in the order of their ranks. A request without clocks
// asks for rows as they are after a number of steps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cache/cache_decisions.h"
#include "owner/node_rows.h"
#include "owner/push_applier.h"
#include "owner/ring.h"
#include "owner/route.h"
#include "owner/shard.h"
#include "vectors.h"

namespace hetmpi {

struct RequestHeader {
  int64_t reason;  // why rows are requested, the same on all ranks in a round; kPushes for a request without reply
  int64_t bound;   // staleness, for requests with clocks
  int64_t step;    // for others: steps that the rows must have
};
constexpr int64_t kPushes = -1, kUnannounced = 0, kAnnounced = 1, kFlush = 2, kPeek = 3;
constexpr const char* kReasonTexts[] = {"reads a batch that was not announced", "announces a batch", "flushes",
                                        "peeks"};
constexpr int64_t kNumReasons = std::size(kReasonTexts);

struct OwnerCounts {
  int64_t num_records;
  int64_t num_keys;  // requested
};

constexpr int64_t kWord = sizeof(int64_t);
inline int64_t whole_words(int64_t bytes) { return (bytes + kWord - 1) / kWord * kWord; }

// The end of an array of so many bytes, padded to whole words.
inline uint8_t* padded(uint8_t* array, int64_t bytes) {
  const int64_t whole = whole_words(bytes);
  if (whole > bytes) std::memset(array + bytes, 0, whole - bytes);  // array may be null, without bytes
  return array + whole;
}

// Gradients to push. Keys are by owner, as route.keys; the other columns by position, as
// route.order.
struct Push {
  int64_t step;
  RouteView route;
  PushColumns columns;
  bool ends_step;                                // every owner gets a record, the last one of this step
  std::shared_ptr<const void> memory = nullptr;  // that these refer to, unless the caller keeps it

  // Bytes of the rows in records for ranks other than `rank`, of so many ranks.
  int64_t bytes_elsewhere(RecordFormat format, int64_t rank, int64_t num_ranks) const {
    int64_t total = 0;
    for (int64_t i = 0; i < route.first[num_ranks]; ++i)
      if (i < route.first[rank] || i >= route.first[rank + 1]) total += columns.row_bytes(route.order[i], format);
    return total;
  }
};

// How a request is written, and its replies read.
class RequestLayout {
 public:
  // requested: their keys; known (n): clocks of this rank's copies, by position, null if the request has no clocks.
  // dims: numbers of each array of a row, in the order of a reply.
  RequestLayout(RouteView requested, const int32_t* known, RequestHeader header, std::vector<Push> pushes,
                RecordFormat format, std::vector<int64_t> dims)
      : requested_(requested),
        known_(known),
        header_(header),
        pushes_(std::move(pushes)),
        format_(format),
        dims_(std::move(dims)) {}

  // Bytes of the request to these owners.
  int64_t bytes(const std::vector<int64_t>& owners) const {
    int64_t total = sizeof(RequestHeader) + owners.size() * sizeof(OwnerCounts);
    for (const int64_t owner : owners) {
      for (const Push& push : pushes_) total += record_bytes(push, owner);
      total += kWord * requested_.num(owner);
      if (known_) total += whole_words(sizeof(int32_t) * requested_.num(owner));
    }
    return total;
  }

  void write(const std::vector<int64_t>& owners, uint8_t* at) const {
    std::memcpy(at, &header_, sizeof(header_));
    auto* counts = reinterpret_cast<OwnerCounts*>(at + sizeof(header_));
    at = reinterpret_cast<uint8_t*>(counts + owners.size());
    for (const int64_t owner : owners) {
      *counts = {0, requested_.num(owner)};
      for (const Push& push : pushes_) {
        const int64_t num_bytes = write_record(push, owner, at);
        if (num_bytes == 0) continue;
        at += num_bytes;
        ++counts->num_records;
      }
      const int64_t begin = requested_.first[owner], n = requested_.num(owner);
      std::copy_n(requested_.keys + begin, n, reinterpret_cast<int64_t*>(at));
      at += kWord * n;
      ++counts;
      if (known_ == nullptr) continue;
      auto* known = reinterpret_cast<int32_t*>(at);
      for (int64_t i = 0; i < n; ++i) known[i] = known_[requested_.order[begin + i]];
      at = padded(at, sizeof(int32_t) * n);
    }
  }

  void forget_pushes() { pushes_.clear(); }

  // Reads the clocks in a reply of these owners, and which rows it has: to owner_clocks and fetched (n), by position.
  // Returns the bytes read; throws std::out_of_range if the reply is shorter.
  int64_t read_clocks(const std::vector<int64_t>& owners, const uint8_t* reply, int64_t size, int32_t* owner_clocks,
                      uint8_t* fetched) const {
    int64_t at = 0;
    for (const int64_t owner : owners) {
      const int64_t n = requested_.num(owner), *order = requested_.order + requested_.first[owner];
      const auto* clocks = reinterpret_cast<const int32_t*>(reply + at);
      at += whole_words(sizeof(int32_t) * n);
      check_end(at, size);
      int64_t num_wanted = 0;
      for (int64_t i = 0; i < n; ++i) {
        const bool wanted = must_send(clocks[i], known_[order[i]], header_.bound);
        owner_clocks[order[i]] = clocks[i];
        fetched[order[i]] = wanted;
        num_wanted += wanted;
      }
      for (const int64_t dim : dims_) at += whole_words(sizeof(float) * num_wanted * dim);
      check_end(at, size);
    }
    return at;
  }

  // Copies the rows in a reply to their positions: outs[a] (n, dims[a]) for each array of a row; after read_clocks if
  // the request has clocks. Throws std::out_of_range if the reply to a request without clocks is shorter than its
  // contents.
  void place(const std::vector<int64_t>& owners, const uint8_t* reply, int64_t size,
             const std::vector<float*>& outs) const {
    const uint8_t* const end = reply + size;
    for (const int64_t owner : owners) {
      const int64_t n = requested_.num(owner), *order = requested_.order + requested_.first[owner];
      const auto* clocks = reinterpret_cast<const int32_t*>(reply);
      if (known_) reply += whole_words(sizeof(int32_t) * n);
      for (size_t a = 0; a < dims_.size(); ++a) {
        const int64_t num_bytes = sizeof(float) * dims_[a];
        if (!known_) check_end(whole_words(num_bytes * n), end - reply);
        int64_t num_rows = 0;
        for (int64_t i = 0; i < n; ++i) {
          if (known_ && !must_send(clocks[i], known_[order[i]], header_.bound)) continue;
          std::memcpy(outs[a] + order[i] * dims_[a], reply + num_rows * num_bytes, num_bytes);
          ++num_rows;
        }
        reply += whole_words(num_bytes * num_rows);
      }
    }
  }

  static void check_end(int64_t at, int64_t size) {
    if (at > size) refuse_short();
  }
  [[noreturn]] static void refuse_short() {
    throw std::out_of_range("request: a message is shorter than its contents");
  }

 private:
  int64_t record_bytes(const Push& push, int64_t owner) const {
    const int64_t n = push.route.num(owner);
    if (n == 0 && !push.ends_step) return 0;
    const int64_t* order = push.route.order + push.route.first[owner];
    int64_t total = sizeof(RecordHeader);
    for (int64_t i = 0; i < n; ++i) total += push.columns.row_bytes(order[i], format_);
    return whole_words(total);
  }

  // Returns the bytes of the record, 0 if the owner gets none.
  int64_t write_record(const Push& push, int64_t owner, uint8_t* at) const {
    const int64_t num_bytes = record_bytes(push, owner);
    if (num_bytes == 0) return 0;
    const int64_t begin = push.route.first[owner], n = push.route.num(owner);
    *reinterpret_cast<RecordHeader*>(at) = {static_cast<uint64_t>(num_bytes), push.step, n, push.ends_step};
    PushColumns from = push.columns;
    from.keys = push.route.keys + begin;
    write_columns(columns_of(at, n, format_), from, push.route.order + begin, n, format_);
    return num_bytes;
  }

  RouteView requested_;
  const int32_t* known_;
  RequestHeader header_;
  std::vector<Push> pushes_;
  RecordFormat format_;
  std::vector<int64_t> dims_;
};

// One table's part of the server (server.h): applies the pushes and answers the requests of its clients for all owners
// of the node.
class TableServer {
 public:
  using Rings = std::vector<RingProducer*>;  // to each owner of the node

  // node: the rows of its owners. rings: for the pushes of each client; null to this rank, if its applier
  // (NodeRows::applier) applies them to its shard. applied: the steps that each owner has applied; empty where pushes
  // are applied one by one, and requests name the clocks of copies.
  TableServer(const NodeRows* node, std::vector<Rings> rings, RecordFormat format,
              std::vector<const int64_t*> applied = {})
      : node_(node), rings_(std::move(rings)), format_(format), applied_(std::move(applied)), due_(rings_.size()) {}

  // Takes the request of a client; its memory must stay until apply() returns true and, if it has clocks, the reply is
  // written. Throws std::out_of_range, and takes nothing, if its contents exceed it or it asks for keys of others. Keys
  // of pushes are checked when they are applied.
  int64_t take(size_t client, const uint8_t* request, int64_t size) {
    const Rings& rings = rings_.at(client);
    RequestLayout::check_end(sizeof(RequestHeader), size);
    const auto& header = *reinterpret_cast<const RequestHeader*>(request);
    const auto* counts = reinterpret_cast<const OwnerCounts*>(request + sizeof(RequestHeader));
    int64_t at = sizeof(RequestHeader) + node_->size() * sizeof(OwnerCounts);
    RequestLayout::check_end(at, size);
    Taken found{header.bound, header.step, {}};
    std::vector<PushedRecord> records;
    for (size_t owner = 0; owner < node_->size(); ++owner, ++counts) {
      for (int64_t i = 0; i < counts->num_records; ++i) {
        const Record record = record_at(request + at, size - at, format_);
        records.push_back({rings.at(owner), record.header, record.columns, 0});
        at += record.header->bytes;
      }
      const int64_t n = counts->num_keys;
      if (n < 0 || n > (size - at) / kWord) RequestLayout::refuse_short();
      const auto* keys = reinterpret_cast<const int64_t*>(request + at);
      const auto* known = reinterpret_cast<const int32_t*>(request + at + kWord * n);
      at += kWord * n;
      if (!is_exact()) at += whole_words(sizeof(int32_t) * n);
      RequestLayout::check_end(at, size);
      RequestedRows& requested = found.of_owner.emplace_back(RequestedRows{std::vector<int64_t>(n), known, {}, {}});
      const NodeShard& shard = node_->shard(owner);
      shard.directory->rows_of(keys, n, requested.rows.data());
      if (shard.file != nullptr) shard.file->want(requested.rows.data(), n);
    }
    if (header.reason < kPushes || header.reason >= kNumReasons)
      throw std::out_of_range("request: for no known reason");
    pushed_.insert(pushed_.end(), records.begin(), records.end());
    if (header.reason != kPushes) due_[client].push_back(std::move(found));
    return header.reason;
  }

  // Whether the table is read at s = 0: requests name no clocks then.
  bool is_exact() const { return !applied_.empty(); }

  // Applies the pushes of all requests taken to this rank's shard, and passes on those to other owners. Returns false
  // if a ring is full: to be called again. Meanwhile records for other rings have gone on: an owner may wait for them
  // before it makes room.
  bool apply() {
    std::vector<const RingProducer*> full;
    size_t num_left = 0;
    for (PushedRecord& record : pushed_) {
      if (record.ring == nullptr) {
        node_->applier()->apply(record.columns, record.header->num_rows);
        continue;
      }
      const bool is_behind = std::find(full.begin(), full.end(), record.ring) != full.end();
      if (!is_behind && pass_on(record)) continue;
      full.push_back(record.ring);
      pushed_[num_left++] = record;
    }
    pushed_.resize(num_left);
    return num_left == 0;
  }

  // Whether the owners of the node have applied so many steps.
  bool has_applied(int64_t step) const {
    return std::all_of(applied_.begin(), applied_.end(),
                       [step](const int64_t* of) { return __atomic_load_n(of, __ATOMIC_ACQUIRE) >= step; });
  }

  // Whether the next reply to a client can be made: the owners have applied the step that it takes, or, where pushes
  // are applied one by one, all of them. True if there is none to make.
  bool is_ready(size_t client) const {
    if (due_.at(client).empty()) return true;
    if (is_exact()) return has_applied(due_[client].front().step);
    const Rings& rings = rings_[client];
    return pushed_.empty() &&
           std::all_of(rings.begin(), rings.end(), [](const auto* ring) { return !ring || ring->is_drained(); });
  }

  // Chooses the rows of the next reply to a client, and returns its bytes, 0 if there is none to make.
  int64_t reply_bytes(size_t client) {
    if (due_.at(client).empty()) return 0;
    Taken& request = due_[client].front();
    int64_t total = 0;
    for (size_t owner = 0; owner < node_->size(); ++owner) {
      RequestedRows& requested = request.of_owner[owner];
      if (!is_exact()) {
        choose(requested, node_->shard(owner), request.bound);
        total += whole_words(sizeof(int32_t) * requested.rows.size());
      }
      for (const int64_t dim : node_->dims()) total += whole_words(sizeof(float) * wanted(requested).size() * dim);
    }
    return total;
  }

  // Writes this reply, and forgets it.
  void write_reply(size_t client, uint8_t* at) {
    if (due_.at(client).empty()) return;
    const Taken request = std::move(due_[client].front());
    due_[client].pop_front();
    for (size_t owner = 0; owner < node_->size(); ++owner) {
      const RequestedRows& requested = request.of_owner[owner];
      if (!is_exact()) {
        std::copy(requested.clocks.begin(), requested.clocks.end(), reinterpret_cast<int32_t*>(at));
        at = padded(at, sizeof(int32_t) * requested.rows.size());
      }
      node_->exclusively(owner, [&] { at = copy_rows(owner, wanted(requested), at); });
    }
  }

 private:
  struct RequestedRows {
    std::vector<int64_t> rows;  // requested
    const int32_t* known;
    std::vector<int32_t> clocks;  // with clocks: of the rows
    std::vector<int64_t> chosen;  // and those of them that the reply has
  };
  struct PushedRecord {
    RingProducer* ring;
    const RecordHeader* header;
    RecordColumns columns;
    int64_t num_passed;  // rows
  };
  struct Taken {  // of a request
    int64_t bound, step;
    std::vector<RequestedRows> of_owner;
  };

  // The rows that a reply has.
  const std::vector<int64_t>& wanted(const RequestedRows& requested) const {
    return is_exact() ? requested.rows : requested.chosen;
  }

  static void choose(RequestedRows& requested, const NodeShard& shard, int64_t bound) {
    requested.clocks.resize(requested.rows.size());
    requested.chosen.clear();
    for (size_t j = 0; j < requested.rows.size(); ++j) {
      requested.clocks[j] = load_clock(shard.clock + requested.rows[j]);  // before the rows, which must not be older
      if (must_send(requested.clocks[j], requested.known[j], bound)) requested.chosen.push_back(requested.rows[j]);
    }
  }

  // Writes the rest of a record into an owner's ring. Returns false if the ring is full.
  bool pass_on(PushedRecord& record) {
    const RecordHeader& header = *record.header;
    return write_rest(header.num_rows, &record.num_passed, [&](int64_t num_rows) {
      const RecordColumns rest = columns_from(record.columns, record.num_passed, format_);
      return record.ring->write(header.step, rest, num_rows, header.is_last);
    });
  }

  uint8_t* copy_rows(size_t owner, const std::vector<int64_t>& rows, uint8_t* at) const {
    for (size_t a = 0; a < node_->dims().size(); ++a) {
      const int64_t num_bytes = sizeof(float) * node_->dims()[a];
      node_->copy(owner, a, rows, [&](size_t i) { return at + i * num_bytes; });
      at = padded(at, num_bytes * rows.size());
    }
    return at;
  }

  const NodeRows* node_;
  std::vector<Rings> rings_;  // of each client
  RecordFormat format_;
  std::vector<const int64_t*> applied_;
  std::vector<std::deque<Taken>> due_;  // requests of each client without a reply
  std::vector<PushedRecord> pushed_;    // not applied or passed on yet
};

}  // namespace hetmpi
