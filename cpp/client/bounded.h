// BoundedClient: one rank's side of a table at s >= 1, HET's client (Miao et al., PVLDB 15(2), 2022, section 3.2;
// docs/design_consistency.md, "The bound").
//
//   read      Find, CheckValid, Fetch: uses lines within the bound; stale lines and keys without a line are fetched,
//             ahead of the read if announced; new lines evict old ones
//   announce  requests clocks and rows from other nodes while the batch before is computed
//   write     Update: each line accumulates the gradient and applies it to its copy, a preview of the owner's update.
//             Sent are gradients summed over more than b iterations (the bound), those of drifted and of evicted
//             lines, and those of keys without a line (sums.h)
//
// A batch's rows come by a pull, which may serve several announced batches: one message to each server then asks for
// the clocks and rows of all their keys, and carries the gradients of as many writes.
//
// By windows, and on one node, no call is collective. By messages all ranks make the same calls in the same order. The
// static calls are for tables that are used together: their messages have a section of each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cache/row_cache.h"
#include "client/client.h"
#include "client/pull_parts.h"
#include "client/sums.h"
#include "key_index.h"
#include "owner/push_applier.h"

namespace hetmpi {

// Progress of a pull or, from kRead on, of a batch.
enum class Phase { kNew, kRequested, kAnswered, kRead, kWritten };
constexpr const char* kPhaseTexts[] = {"not requested", "requested",
                                       "requested, and other ranks' requests of the same round are answered", "read",
                                       "written"};

// Keys with their lines, once they were asked for: slots (n), -1 for none; clocks (n): c_g at the read, and the
// iterations of previewed held sums; without a bound 0 for keys with a line, and undefined if all have one on a GPU.
struct KeyLines {
  KeysOfCall keys;
  Buffer<int64_t> slots;
  Buffer<int32_t> clocks;
  Phase phase = Phase::kNew;

  KeyLines(KeysOfCall of, Lines& lines)
      : keys(std::move(of)), slots(lines.empty<int64_t>(keys->size())), clocks(lines.empty<int32_t>(keys->size())) {}

  int64_t num() const { return keys->size(); }

  // Throws std::logic_error in any phase but `before`.
  void enter(Phase next, Phase before) {
    if (phase != before)
      throw std::logic_error(std::string("a batch that is ") + kPhaseTexts[static_cast<int>(phase)] +
                             " cannot become " + kPhaseTexts[static_cast<int>(next)]);
    phase = next;
  }
};

// The rows of one or several batches, on their way from the owners. From phase kRead on, all lines of the batches are
// here.
struct Pull : KeyLines {
  bool is_joint = false;              // of several batches
  std::shared_ptr<const Route> near;  // the keys that are read on this node when the replies are: of a single batch
                                      // all, of several those that may be cached; the others are read with their batch
  Found found;                        // keys with a line when they were looked up
  std::shared_ptr<Request> request;   // to other nodes, in phases kRequested and kAnswered
  Buffer<float> rows, states;         // in phase kRead: (n, dim), (n, preview_dim), those of keys without a line
  std::vector<uint8_t> is_uncached;   // of several batches, once their lines are there: (n) keys of other nodes without
  size_t num_previewed = 0;           // held sums that are previewed on these rows

  // Of one batch: its slots and clocks, in the same memory.
  explicit Pull(const KeyLines& batch) : KeyLines(batch), near(keys->local_route) {}

  // Of the distinct keys of several batches.
  Pull(KeysOfCall of, Lines& lines) : KeyLines(std::move(of), lines), is_joint(true) {
    near = std::make_shared<const Route>(keys->local_route->where(keys->is_admitted.data()));
  }

  bool has_all_lines() { return found.num() == num(); }

  // (n): keys of other nodes and, for several batches, keys that may not be cached.
  std::vector<uint8_t> decided() const {
    std::vector<uint8_t> is_decided = keys->is_remote;
    for (int64_t i = 0; is_joint && i < num(); ++i) is_decided[i] |= !keys->is_admitted[i];
    return is_decided;
  }

  void free_rows() { rows = states = {}; }
};

// In phase kRead, slots and clocks are those of the read, and no other read or write has followed.
struct Batch : KeyLines {
  using KeyLines::KeyLines;

  std::shared_ptr<Pull> pull;   // brings its rows; null until they are requested, and in a write without a read
  std::vector<int64_t> places;  // of its keys in a joint pull
  int64_t first_new = 0;        // keys of a joint pull from this place on are in none of the batches read before
  int64_t num_released = 0;     // keys whose gradients are released by its write, as they have no line

  int64_t num_without() const {
    return pull && !pull->is_joint && pull->has_all_lines() ? 0 : num() - num_lines(slots);
  }

  // REQUIRES: no transfer is in progress.
  void reset() {
    phase = Phase::kNew;
    pull = nullptr;
    places.clear();
    first_new = 0;
  }
};

class BoundedClient {
 public:
  struct Settings {
    int64_t bound;            // staleness at which clocks are compared
    size_t batches_per_pull;  // announced batches that one pull serves
    float anticipate;         // factor of an own update of a line
  };
  // Learning rates of a step, counted from 0, and of some that follow: other ranks may be ahead.
  using Rates = std::function<std::vector<double>(int64_t step)>;
  using Clients = std::vector<BoundedClient*>;

  // applier: of pushes to this rank's shard. rule: of the rows.
  BoundedClient(Table table, PushApplier* applier, const RowOptimizer& rule, Rates rates, Settings settings)
      : table_(std::move(table)),
        applier_(applier),
        rule_(rule),
        rates_(std::move(rates)),
        settings_(settings),
        sums_(&table_, applier) {}

  BoundedClient(const BoundedClient&) = delete;
  BoundedClient& operator=(const BoundedClient&) = delete;

  const Table& table() const { return table_; }
  int64_t step() const { return step_; }  // steps written so far
  const Batch* last() const { return last_.get(); }
  size_t num_held() const { return sums_.held().size(); }

  // Continues as after `step` steps.
  void resume_at(int64_t step) {
    step_ = step;
    set_rates();
  }

  // keys -> rows of each table.
  static std::vector<ModelRows> read(const Clients& clients, const std::vector<KeysOfCall>& keys) {
    Spans& spans = *clients.at(0)->table_.spans;
    const size_t n = clients.size();
    std::vector<std::shared_ptr<Batch>> batches;
    {
      const InPart find(spans, kFind);  // first: a dropped pull may release gradients
      for (size_t i = 0; i < n; ++i) batches.push_back(clients[i]->begin_read(keys.at(i)));
    }
    {
      const InPart drain(spans, kDrain);
      for (BoundedClient* client : clients) client->send_and_drain();
    }
    {
      const InPart find(spans, kFind);
      std::vector<std::shared_ptr<Pull>> pulls;
      for (const auto& batch : batches) pulls.push_back(batch->pull->phase == Phase::kNew ? batch->pull : nullptr);
      request(clients, pulls, false);
    }
    std::vector<std::optional<Judged>> judged;
    {
      const InPart validate(spans, kValidate);
      for (size_t i = 0; i < n; ++i) clients[i]->answer_round(*batches[i]->pull);
      for (size_t i = 0; i < n; ++i) judged.push_back(clients[i]->check_valid(*batches[i]->pull));
    }
    std::vector<ModelRows> delivered;
    {
      const InPart fetch(spans, kFetch);
      for (size_t i = 0; i < n; ++i) {
        if (judged[i]) clients[i]->fetch(*batches[i]->pull, *judged[i]);
        delivered.push_back(clients[i]->deliver(*batches[i]));
        clients[i]->free_rows();
      }
    }
    const InPart prefetch(spans, kPrefetch);
    request_complete(clients);
    return delivered;
  }

  // These keys are requested from other nodes once they are the next ones to be read.
  static void announce(const Clients& clients, const std::vector<KeysOfCall>& keys) {
    for (size_t i = 0; i < clients.size(); ++i) clients[i]->announce(keys.at(i));
    request_complete(clients);
  }

  static void write(const Clients& clients, const std::vector<KeysOfCall>& keys, const std::vector<ModelRows>& grads) {
    Spans& spans = *clients.at(0)->table_.spans;
    std::vector<std::shared_ptr<Batch>> batches;
    {
      const InPart push(spans, kPush);
      for (BoundedClient* client : clients) client->begin_write();
      for (size_t i = 0; i < clients.size(); ++i) batches.push_back(clients[i]->update(keys.at(i), grads.at(i)));
    }
    {
      const InPart validate(spans, kValidate);
      std::vector<std::shared_ptr<Pull>> pulls;
      for (BoundedClient* client : clients) pulls.push_back(client->next_of_write());
      request(clients, pulls, true);
      for (BoundedClient* client : clients) client->serve_next();
    }
    const InPart push(spans, kPush);
    for (size_t i = 0; i < clients.size(); ++i) clients[i]->end_step(*batches[i]);
  }

  // Sends all pending gradients of this rank to their owners and waits until they are applied.
  void send_all() {
    drop_all();
    send_last();
    table_.lines->due_all();
    push_all();
  }

  // The same for the gradients that the lines have released, and applies received ones.
  void await_owners() {
    drop_all();
    send_and_drain();
    push_all();
  }

  // Tells the owner's side this rank's step. Returns its learning rate.
  double set_rates() {
    const std::vector<double> rates = rates_(step_);
    applier_->set_step(rates.data(), static_cast<int64_t>(rates.size()), step_ + 1);
    return rates.at(0);
  }

  // Drops the pulls of all announced batches, which may still be read.
  void drop_all() {
    for (const auto& batch : ahead_) drop(*batch);
    free_rows();
  }

  void peek(const Keys& keys, float* out) const { hetmpi::peek(table_, keys, 0, out); }

 private:
  struct Judged {
    Buffer<uint8_t> is_stale;         // (n): lines that are stale, or refreshed as their rows have come
    std::vector<uint8_t> is_missing;  // (n): rows needed of this node
    JudgedCounts counts;
  };

  const Lines::Form& form() const { return table_.lines->form(); }
  bool has_states() const { return table_.node->dims().size() > 1; }
  Exchange& exchange() const { return *table_.channel->exchange; }

  // Batches ahead of their reads.

  void announce(const KeysOfCall& keys) {
    check_room(ahead_.size());
    if (can_prepare()) ahead_.push_back(batch_of(keys));
  }

  // Whether announcing a batch has any use: rows can be fetched ahead, or lines looked up while a GPU computes. Without
  // a line a row lacks the mean square that held gradients need.
  bool can_prepare() const {
    return form().capacity_rows > 0 && (form().computes_beside || !table_.channel->is_one_node());
  }

  std::shared_ptr<Batch> batch_of(const KeysOfCall& keys) const { return std::make_shared<Batch>(keys, *table_.lines); }

  // The batch to be read now, with its pull. Drops batches announced earlier that were not read.
  std::shared_ptr<Batch> begin_read(const KeysOfCall& keys) {
    last_ = next_of(keys);
    if (!last_->pull) last_->pull = std::make_shared<Pull>(*last_);
    return last_;
  }

  std::shared_ptr<Batch> next_of(const KeysOfCall& keys) {
    while (!ahead_.empty()) {
      const std::shared_ptr<Batch> batch = std::move(ahead_.front());
      ahead_.pop_front();
      if (batch->keys->are_those_of(*keys)) return batch;
      drop(*batch);
    }
    return batch_of(keys);
  }

  // The batch to be written now: that of the last read, if the keys are the same and it is not written yet. Otherwise a
  // new one: a GPU may still read the slots of a batch that is written.
  std::shared_ptr<Batch> of_write(const KeysOfCall& keys) {
    const bool is_second = last_ && last_->phase == Phase::kWritten;  // without a read in between
    if (is_next(Phase::kAnswered) || (is_second && is_next(Phase::kRead)))
      drop(*ahead_.front());  // this write was not foreseen when lines were judged
    const bool is_last = last_ && last_->phase == Phase::kRead && last_->keys->are_those_of(*keys);
    return is_last ? last_ : batch_of(keys);
  }

  // Whether the pull of the batch that is read next is in this phase.
  bool is_next(Phase phase) const {
    if (ahead_.empty()) return false;
    return (ahead_.front()->pull ? ahead_.front()->pull->phase : Phase::kNew) == phase;
  }

  // The next pull, to be requested, if all batches that it serves are announced; else null.
  std::shared_ptr<Pull> next_complete() {
    return ahead_.size() >= settings_.batches_per_pull && is_next(Phase::kNew) ? next_pull() : nullptr;
  }

  // At a write: the next pull, to be requested although fewer batches may be announced than it could serve.
  std::shared_ptr<Pull> next_of_write() {
    const bool is_first = last_ && last_->phase == Phase::kRead;  // write after a read
    return is_first && is_next(Phase::kNew) ? next_pull() : nullptr;
  }

  // The pull of the batch that is read next, with those after it that one pull serves.
  std::shared_ptr<Pull> next_pull() {
    if (!may_be_late()) sums_.send(step_);
    const size_t num = std::min(ahead_.size(), settings_.batches_per_pull);
    if (num == 1) return ahead_.front()->pull = std::make_shared<Pull>(*ahead_.front());
    std::vector<int64_t> all;
    for (size_t i = 0; i < num; ++i)
      all.insert(all.end(), ahead_[i]->keys->array.begin(), ahead_[i]->keys->array.end());
    std::vector<int64_t> places(all.size());
    distinct_.number_all(all.data(), all.size(), places.data());
    const auto& keys = distinct_.keys();
    const auto pull = std::make_shared<Pull>(
        std::make_shared<const Keys>(*table_.space, keys.data(), distinct_.size(), nullptr), *table_.lines);
    auto begin = places.begin();
    int64_t first_new = 0;
    for (size_t i = 0; i < num; begin += ahead_[i++]->num()) {
      Batch& batch = *ahead_[i];
      batch.pull = pull;
      batch.places.assign(begin, begin + batch.num());
      batch.first_new = first_new;
      for (const int64_t place : batch.places) first_new = std::max(first_new, place + 1);
    }
    return pull;
  }

  // Sends the requests of the clients' pulls, null where there is none to send, in one message to each server.
  // is_written: whether a batch is written before they are read.
  static void request(const Clients& clients, const std::vector<std::shared_ptr<Pull>>& pulls, bool is_written) {
    Exchange::Requests asked;
    try {
      for (size_t i = 0; i < clients.size(); ++i)
        if (pulls[i]) asked.push_back(clients[i]->request(*pulls[i], is_written && clients[i]->last_));
      if (!asked.empty()) clients[0]->exchange().ask(asked);
    } catch (...) {
      for (size_t i = 0; i < clients.size(); ++i) clients[i]->end_request(pulls[i]);
      throw;
    }
    for (size_t i = 0; i < clients.size(); ++i) clients[i]->end_request(pulls[i]);
  }

  // Forgets the sums that have left with a request. If that has not left, as after an error, its batches are as if they
  // had just been announced.
  void end_request(const std::shared_ptr<Pull>& pull) {
    if (!pull) return;
    if (pull->request && pull->request->round() >= 0) return sums_.forget_held();
    if (last_ && last_->pull == pull) last_->reset();
    for (const auto& batch : ahead_)
      if (batch->pull == pull) batch->reset();
  }

  static void request_complete(const Clients& clients) {
    std::vector<std::shared_ptr<Pull>> pulls;
    for (BoundedClient* client : clients) pulls.push_back(client->next_complete());
    request(clients, pulls, true);
  }

  // Finds the lines of a pull and makes its request, with the held sums in front.
  std::shared_ptr<Request> request(Pull& pull, bool is_written) {
    pull.enter(Phase::kRequested, Phase::kNew);
    const Keys& keys = *pull.keys;
    const bool knows = settings_.bound != kUnbounded && keys.remote_route->size() > 0;
    Buffer<int32_t> known = knows ? table_.lines->empty<int32_t>(pull.num()) : Buffer<int32_t>();
    pull.found = table_.lines->ask(keys.array, pull.slots, known, is_written, settings_.bound);
    std::shared_ptr<const Route> route = keys.remote_route;
    if (knows) pull.found.num();                               // the clocks are there then
    if (settings_.bound == kUnbounded && route->size() > 0) {  // no line is too old: those without one are asked for
      if (gpu_has_all_rows(pull)) {
        route = std::make_shared<const Route>(table_.space->partition.size());
      } else {
        route = std::make_shared<const Route>(route->where(without_line(pull).data()));
        known = Buffer<int32_t>::of(pull.num());
        std::fill(known.begin(), known.end(), kNoLine);
        std::fill(pull.clocks.begin(), pull.clocks.end(), 0);
      }
    }
    table_.counters->clock_bytes += sizeof(int32_t) * route->size();
    const RequestHeader header{is_written ? kAnnounced : kUnannounced, settings_.bound, 0};
    pull.request = std::make_shared<Request>(*table_.channel, header, route, sums_.pushes(), known, pull.clocks);
    return pull.request;
  }

  static std::vector<uint8_t> without_line(Pull& pull) {
    pull.found.num();
    std::vector<uint8_t> mask(pull.num());
    for (int64_t i = 0; i < pull.num(); ++i) mask[i] = pull.slots[i] < 0;
    return mask;
  }

  // At a write: answers other ranks' requests in the round of the batch that is read next, if it is requested. Sums
  // that fall due in this write leave after that request: previews of them are added to its rows.
  void serve_next() {
    if (is_next(Phase::kRequested)) {
      answer_round(*ahead_.front()->pull);
    } else if (sums_.count_idle()) {
      drop_all();  // the rows of a pull would lack the gradients that leave now
      sums_.send_held(settings_.bound);
    }
  }

  // Answers other ranks' requests in the round of this one, if it is requested and they are not answered.
  void answer_round(Pull& pull) {
    if (pull.phase != Phase::kRequested) return;
    pull.enter(Phase::kAnswered, Phase::kRequested);
    exchange().serve(pull.request->round());
  }

  // Ends the transfers of a batch and ignores their data; also for the other batches of its pull.
  void drop(Batch& batch) {
    const std::shared_ptr<Pull> pull = batch.pull;
    if (pull && pull->request) {
      exchange().drop(*pull->request);
      table_.counters->row_bytes += pull->request->num_bytes();
    }
    for (const auto& other : ahead_)
      if (pull && other->pull == pull) other->reset();
    batch.reset();
  }

  // Frees the rows of the last read's pull, unless they serve the next read too.
  void free_rows() {
    const std::shared_ptr<Pull> pull = last_ ? last_->pull : nullptr;
    if (pull && (ahead_.empty() || ahead_.front()->pull != pull)) pull->free_rows();
  }

  // Read.

  // Sends released gradients, of the last write and of lines evicted in a read that no write followed, and applies
  // received ones. Late ones too, if a read has followed their write: their lines may have been evicted.
  void send_and_drain() {
    if (!is_behind_) send_last();
    sums_.send(step_);
    is_behind_ = false;
    applier_->drain();
  }

  // Receives the replies, reads the clocks of this node and judges the lines. Null if an earlier batch of the pull has.
  std::optional<Judged> check_valid(Pull& pull) {
    if (pull.phase != Phase::kAnswered) return std::nullopt;
    Counters& counters = *table_.counters;
    exchange().receive(pull.request->round());
    counters.row_bytes += pull.request->num_bytes();
    sums_.await_all(step_);  // rows of this node must have this rank's gradients
    pull.found.num();        // the lines are known
    const bool is_bounded = settings_.bound != kUnbounded;
    if (!is_bounded && gpu_has_all_rows(pull)) {
      table_.lines->judge(pull.keys->array, pull.slots, nullptr, {}, pull.keys->num_admitted, kUnbounded, {});
      counters.hits += pull.num();
      return Judged{{}, {}, {pull.num(), 0, 0}};
    }
    const bool has_remote = pull.keys->remote_route->size() > 0;
    if (!is_bounded) {
      if (!has_remote) std::fill(pull.clocks.begin(), pull.clocks.end(), 0);
      table_.read_clocks(pull.near->where(without_line(pull).data()), pull.clocks.data());
    } else if (has_remote || pull.is_joint || !table_.lines->reads_clocks()) {
      table_.read_clocks(*pull.near, pull.clocks.data());
    } else {
      counters.clock_bytes += sizeof(int32_t) * pull.near->num_elsewhere(table_.rank());
    }
    Judged judged{table_.lines->empty<uint8_t>(pull.num()), {}, {}};
    const std::vector<uint8_t>& fetched = pull.request->fetched();
    int64_t num_stale = 0;
    if (form().capacity_rows > 0)
      num_stale =
          table_.lines->judge(pull.keys->array, pull.slots, has_remote || pull.is_joint ? fetched.data() : nullptr,
                              pull.clocks, pull.keys->num_admitted, settings_.bound, judged.is_stale);
    else
      std::fill(judged.is_stale.begin(), judged.is_stale.end(), 0);
    if (num_stale == 0 && !has_remote && gpu_has_all_rows(pull)) {
      judged.counts = {pull.num(), 0, 0};
    } else {
      judged.is_missing.resize(pull.num());
      judged.counts = decide(pull.slots.data(), fetched.data(), pull.decided().data(), pull.num(),
                             judged.is_stale.data(), judged.is_missing.data());
    }
    counters.validated += is_bounded ? judged.counts.num_found : 0;
    counters.hits += judged.counts.num_found - judged.counts.num_stale;
    counters.stale += judged.counts.num_stale;
    return judged;
  }

  // Whether all rows of one batch lie in lines of the processor that computes the model: if no line is stale, the host
  // need not touch a row.
  bool gpu_has_all_rows(Pull& pull) const { return form().computes_beside && !pull.is_joint && pull.has_all_lines(); }

  // Sets the rows and states of a pull, and refreshes the lines.
  void fetch(Pull& pull, const Judged& judged) {
    if (judged.counts.num_stale > 0 && are_late_) {
      send_last();
      sums_.await_all(step_);
    }
    if (!gpu_has_all_rows(pull) || judged.counts.num_stale > 0) fetch_rows(pull, judged);
    pull.enter(Phase::kRead, Phase::kAnswered);
    pull.request = nullptr;  // its memory is not needed any more
  }

  void fetch_rows(Pull& pull, const Judged& judged) {
    pull.rows = table_.lines->empty<float>(pull.num() * form().dim);
    pull.states = table_.lines->empty<float>(pull.num() * form().preview_dim);
    pull.request->place({pull.rows.data(), pull.states.data()});
    preview_held(pull, pull.request->fetched());
    if (judged.counts.num_missing > 0) {
      const Route route = pull.keys->route->where(judged.is_missing.data());
      table_.read(kWeight, route, pull.rows.data());
      if (has_states()) table_.read(kMeanSquare, route.where(pull.keys->is_admitted.data()), pull.states.data());
    }
    if (judged.counts.num_stale > 0)
      table_.lines->accept(pull.slots, judged.is_stale, pull.rows, pull.states, pull.clocks, settings_.anticipate);
  }

  // The rows of a batch: from lines, or fetched; the latter get a line if they may be cached.
  ModelRows deliver(Batch& batch) {
    if (batch.pull->is_joint) return deliver_part(batch);
    ModelRows rows = table_.lines->rows(batch.slots, batch.pull->rows, batch.num());
    if (!batch.pull->has_all_lines()) insert(batch, rows, batch.pull->states);
    batch.enter(Phase::kRead, Phase::kNew);
    return rows;
  }

  // The rows of one of the batches of a pull. Lines include this rank's later updates; rows of other nodes without a
  // line get them as previews of held sums, those of this node are read again.
  ModelRows deliver_part(Batch& batch) {
    Pull& pull = *batch.pull;
    Counters& counters = *table_.counters;
    if (pull.is_uncached.empty()) {
      insert(pull, table_.lines->moved(pull.rows, pull.num()), pull.states);
      await_slots();
      pull.is_uncached = without_line(pull);
      for (int64_t i = 0; i < pull.num(); ++i) pull.is_uncached[i] &= pull.keys->is_remote[i];
    }
    preview_held(pull, pull.is_uncached);
    const Buffer<float> rows = table_.lines->empty<float>(batch.num() * form().dim);
    std::vector<uint8_t> is_left(batch.num());
    const PulledKeys pulled{pull.slots.data(), pull.clocks.data(), pull.is_uncached.data(), pull.rows.data(),
                            form().dim};
    const PartCounts counts =
        part_of_pull(pulled, batch.places.data(), batch.keys->is_admitted.data(), batch.first_new, batch.num(),
                     batch.slots.data(), batch.clocks.data(), rows.data(), is_left.data());
    counters.hits += counts.num_hits;
    counters.misses += counts.num_repeated - counts.num_hits;
    if (counts.num_missing > 0) {
      sums_.await_all(step_);
      const Route route = batch.keys->local_route->where(is_left.data());
      table_.read_clocks(route, batch.clocks.data());
      table_.read(kWeight, route, rows.data());
    }
    batch.enter(Phase::kRead, Phase::kNew);
    return table_.lines->rows(batch.slots, rows, batch.num());
  }

  // Gives the keys that have no line and may be cached a line with their rows.
  void insert(const KeyLines& of, const ModelRows& rows, const Buffer<float>& states) {
    if (form().capacity_rows == 0) return;
    table_.counters->misses +=
        table_.lines->insert(of.keys->array, of.keys->is_admitted, rows, states, of.clocks, of.slots);
    table_.counters->evicted += table_.lines->num_evicted();
  }

  // Previews on the chosen (n) rows the sums that are held since the last call.
  void preview_held(Pull& pull, const std::vector<uint8_t>& chosen) {
    const Sums::Held& held = sums_.held();  // empty without a cache, where no state is fetched
    for (; pull.num_previewed < held.size(); ++pull.num_previewed) {
      const SentSums& sent = *held[pull.num_previewed];
      std::vector<int64_t> places(sent.route.num_positions());
      sent.route.find_in(pull.keys->array.data(), chosen.data(), pull.num(), places.data());
      preview_sums(rule_, places.data(), static_cast<int64_t>(places.size()), sent.sums->sums.data(),
                   sent.sums->counts.data(), sent.sums->clocks.data(), settings_.anticipate, pull.rows.data(),
                   pull.states.data(), pull.clocks.data());
    }
  }

  // Write.

  // Sends what is left of the write before, which may be found not to be finite: before any table changes.
  void begin_write() {
    await_slots();
    send_last();
  }

  // Lines, and how many were evicted, are known then.
  void await_slots() {
    table_.lines->await_slots();
    table_.counters->evicted += table_.lines->num_evicted();
  }

  // HET's Update of the lines; releases gradients of keys without a line.
  std::shared_ptr<Batch> update(const KeysOfCall& keys, const ModelRows& grads) {
    std::shared_ptr<Batch> batch = of_write(keys);
    const double lr = set_rates();
    table_.lines->set_step(lr, step_ + 1);
    rule_.set_step(lr, step_ + 1);
    if (batch->phase != Phase::kRead) {  // takes the clocks that need no reply of another rank
      table_.lines->ask(keys->array, batch->slots, {}, false, settings_.bound).num();
      std::fill(batch->clocks.begin(), batch->clocks.end(), kUnknownClock);
      table_.read_clocks(*keys->local_route, batch->clocks.data());
    }
    batch->num_released = batch->num_without();
    table_.lines->update(keys->array, batch->slots, batch->clocks, grads, batch->num_released, settings_.anticipate);
    return batch;
  }

  void end_step(Batch& batch) {
    are_late_ = may_be_late() && batch.num_released == 0;
    table_.lines->due(batch.slots, bound_of_due(), are_late_);
    is_behind_ = may_be_late();
    if (!is_behind_) sums_.send(step_);
    for (Batch* known : {&batch, last_.get()})
      if (known != nullptr && (known->phase == Phase::kRead || known->phase == Phase::kNew))
        known->phase = Phase::kWritten;  // its clocks are older than this write
    ++step_;
  }

  // Whether what a write releases leaves later, so that the host need not wait until a GPU has computed its gradients:
  // sums of evicted lines at the next read, which may fetch their rows; sums that fell due (is_late), if all keys of
  // the batch have lines, at the next write, or as soon as owners' rows of such lines are fetched. Until then the Lines
  // keep them, and judge() knows it.
  bool may_be_late() const {
    return form().computes_beside && table_.channel->is_one_node() && settings_.batches_per_pull == 1;
  }

  // The bound of the sums that are due: less by the step that late ones take, if other ranks read the rows.
  int64_t bound_of_due() const {
    const bool are_others = table_.space->partition.size() > 1;
    return settings_.bound == kUnbounded || !may_be_late() || !are_others ? settings_.bound : settings_.bound - 1;
  }

  // Sends what the last write has released and did not send.
  void send_last() {
    if (is_behind_) sums_.send(step_ - 1);
    if (are_late_) sums_.send(step_ - 1, true);
    is_behind_ = are_late_ = false;
  }

  void push_all() {
    send_last();
    sums_.send(step_);
    await_slots();  // counts
    sums_.send_held(settings_.bound);
    sums_.await_all(step_);
  }

  Table table_;
  PushApplier* applier_;
  RowOptimizer rule_;  // of previews
  Rates rates_;
  Settings settings_;
  Sums sums_;
  int64_t step_ = 0;
  // Of the last write: whether it has not sent what it released, and what fell due.
  bool is_behind_ = false, are_late_ = false;
  std::deque<std::shared_ptr<Batch>> ahead_;  // announced and not read; those of one pull first
  std::shared_ptr<Batch> last_;               // of the last read
  KeyIndex distinct_;                         // of the last joint pull
};

}  // namespace hetmpi
