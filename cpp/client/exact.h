// ExactClient: one rank's side of a table at s = 0: every read sees all writes of the step before, from all ranks,
// applied once.
//
//   read      fetches the rows from their owners; nothing is cached, as each step changes the rows that it reads. The
//             request leaves before the last step is applied here; an owner replies when all of its node have applied
//             it
//   announce  lets the request of the next batch leave with the write before its read, so that rows come while the
//             dense layers are summed. By windows it does nothing: rows would not travel before their reader gets them
//             (docs/negative.md, "Wire")
//   write     each rank sends its gradients to their owners; of rows on a device (device_rows.h) applies them there
//   apply     (in write on one node, and where replies are on their way; otherwise in the next read) each owner waits
//             for the gradients of all ranks, sums them per key in an order of ranks (owner/rank_sums.h) and applies
//             the row optimizer once; a read waits for all owners of its node
//
// A gradient is, at any time, in one of these places: the caller's tensor (open_, which later keeps the route), or the
// reducer's copy of what this rank owns; a message to a server, on its wire or taken there; a ring of its origin at the
// owner; the reducer's sums; the row.
//
// So write and the following read (or flush) are collective: every rank makes these calls; a rank without keys passes
// none. The static calls are for tables that are used together: their messages have a section of each.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "client/client.h"
#include "client/device_rows.h"
#include "owner/step_reducer.h"

namespace hetmpi {

class ExactClient {
 public:
  using Clients = std::vector<ExactClient*>;
  using Rate = std::function<double(int64_t step)>;  // learning rate of a step, counted from 0

  // device: has the rows of a table of one rank; null: owners have them, in host memory.
  ExactClient(Table table, StepReducer reducer, const RowOptimizer& rule, Rate rate, DeviceRows* device = nullptr)
      : table_(std::move(table)), reducer_(std::move(reducer)), rule_(rule), rate_(std::move(rate)), device_(device) {}

  const Table& table() const { return table_; }
  int64_t step() const { return step_; }  // steps written and settled
  void resume_at(int64_t step) { step_ = step; }
  bool is_written() const { return is_written_; }  // no read, flush or settle since the write
  size_t num_ahead() const { return ahead_.size(); }
  bool has_device_rows() const { return device_ != nullptr; }

  // keys -> rows of each table.
  static std::vector<ModelRows> read(const Clients& clients, const std::vector<KeysOfCall>& keys) {
    Spans& spans = *clients.at(0)->table_.spans;
    Exchange& exchange = clients[0]->exchange();
    exchange.check();
    const size_t n = clients.size();
    std::vector<std::shared_ptr<Request>> requests;
    for (size_t i = 0; i < n; ++i) requests.push_back(clients[i]->announced_request(*keys.at(i)));
    {
      const InPart fetch(spans, kFetch);
      Exchange::Requests asked;
      for (size_t i = 0; i < n; ++i) {
        const std::shared_ptr<const Route>& route = keys[i]->remote_route;
        if (requests[i] || !clients[i]->table_.channel->must_ask(*route)) continue;
        requests[i] = clients[i]->request(kUnannounced, route, clients[i]->steps_written());
        asked.push_back(requests[i]);
      }
      exchange.ask(asked);
    }
    apply_written(clients);
    const InPart fetch(spans, kFetch);
    std::vector<Buffer<float>> rows;
    for (size_t i = 0; i < n; ++i)
      rows.push_back(clients[i]->device_ ? Buffer<float>() : clients[i]->read_node(*keys[i]));
    std::vector<ModelRows> delivered;
    for (size_t i = 0; i < n; ++i) {
      if (requests[i]) {
        exchange.receive(requests[i]->round());
        requests[i]->place({rows[i].data()});
      }
      DeviceRows* device = clients[i]->device_;
      delivered.push_back(device ? device->read(keys[i])
                                 : clients[i]->table_.lines->rows({}, rows[i], keys[i]->size()));
    }
    return delivered;
  }

  static void announce(const Clients& clients, const std::vector<KeysOfCall>& keys) {
    for (size_t i = 0; i < clients.size(); ++i) {
      ExactClient& client = *clients[i];
      if (client.is_written_)
        throw std::runtime_error(
            "EmbeddingTable.prefetch: call it between a read and the write after it, not after write");
      check_room(client.ahead_.size());
      if (client.table_.channel->is_collective) client.ahead_.push_back({keys.at(i), nullptr});
    }
  }

  // grads: (n, dim), finite and in host memory, or where the device's rows are. Throws std::runtime_error for a step
  // that is written already.
  static void write(const Clients& clients, const std::vector<KeysOfCall>& keys, const std::vector<ModelRows>& grads) {
    Spans& spans = *clients.at(0)->table_.spans;
    Exchange& exchange = clients[0]->exchange();
    const bool is_one_node = clients[0]->table_.channel->is_one_node();
    exchange.check();
    for (const ExactClient* client : clients)
      if (client->is_written_)
        throw std::runtime_error(
            "EmbeddingTable.write: this step is written already: read or flush before the next write");
    {
      const InPart push(spans, kPush);
      for (const ExactClient* client : clients)
        if (client->device_) client->device_->check();
      std::vector<Push> pushes;
      for (size_t i = 0; i < clients.size(); ++i) pushes.push_back(clients[i]->begin_step(keys.at(i), grads.at(i)));
      if (!is_one_node) {
        Exchange::Requests posted;
        for (size_t i = 0; i < clients.size(); ++i) posted.push_back(clients[i]->posted(pushes[i]));
        exchange.post(posted);
      }
      for (size_t i = 0; i < clients.size(); ++i) {
        if (!clients[i]->device_) send_on_node(clients[i]->table_, pushes[i]);
        clients[i]->table_.counters->pushed += keys[i]->size();
      }
    }
    Clients early;
    for (ExactClient* client : clients)
      if (is_one_node || exchange.awaits(client->table_.channel)) early.push_back(client);
    apply(early);
    for (ExactClient* client : clients) {
      if (client->ahead_.empty() || !client->ahead_.front().request) continue;
      const InPart drain(spans, kDrain);
      exchange.serve(client->ahead_.front().request->round());  // rows leave, and arrive during the dense allreduce
    }
  }

  // Applies the gradients of all ranks' last write here: a read waits for the owners of its node, settle() for all.
  static void apply_written(const Clients& clients) {
    apply(clients);
    for (ExactClient* client : clients) {
      client->step_ += client->is_written_;
      client->is_written_ = false;
    }
  }

  // Receives the replies that are awaited, and forgets the requests of announced batches: rows may be assigned before
  // they are read.
  void receive_all() {
    const InPart drain(*table_.spans, kDrain);
    if (device_) device_->check();
    exchange().receive_all();
    for (Announced& batch : ahead_) batch.request = nullptr;
  }

  // Takes the gradients that have arrived, while this rank waits for others.
  void receive_pending() {
    if (reducer_.is_open()) reducer_.poll();
  }

  void peek(const Keys& keys, float* out) const {
    if (is_written_)
      throw std::runtime_error("EmbeddingTable.peek: a write is not settled yet: call flush() on every rank first");
    if (device_)
      device_->copy(keys, out);
    else
      hetmpi::peek(table_, keys, step_, out);
  }

 private:
  // A batch that a later read will ask for, and its request once that has left.
  struct Announced {
    KeysOfCall keys;
    std::shared_ptr<Request> request;
  };
  // The gradients of a step.
  struct Gradients {
    KeysOfCall keys;
    ModelRows grads;
  };

  Exchange& exchange() const { return *table_.channel->exchange; }
  int64_t steps_written() const { return step_ + is_written_; }

  std::shared_ptr<Request> request(int64_t reason, std::shared_ptr<const Route> route, int64_t step,
                                   std::vector<Push> pushes = {}) const {
    return std::make_shared<Request>(*table_.channel, RequestHeader{reason, 0, step}, std::move(route),
                                     std::move(pushes));
  }

  // The request of a batch that is read now, if it has left. Drops batches announced earlier that were not read.
  std::shared_ptr<Request> announced_request(const Keys& keys) {
    while (!ahead_.empty()) {
      const Announced batch = std::move(ahead_.front());
      ahead_.pop_front();
      if (!batch.keys->are_those_of(keys)) continue;
      return batch.request && batch.request->step() == steps_written() ? batch.request : nullptr;
    }
    return nullptr;
  }

  // Rows (n, dim), in which those of this node are as they are after the steps written.
  Buffer<float> read_node(const Keys& keys) const {
    const Buffer<float> rows = table_.lines->empty<float>(keys.size() * table_.lines->form().dim);
    table_.waits().wait(
        [this] { return table_.channel->server->has_applied(steps_written()); },
        [this] {
          return Awaited{
              "in step " + std::to_string(steps_written()) + " for the ranks of its node to apply the gradients", {}};
        });
    table_.read(kWeight, *keys.route, rows.data());
    return rows;
  }

  // Begins a step with this rank's gradients. Returns what the owners get; without owners the step is applied.
  Push begin_step(const KeysOfCall& keys, const ModelRows& grads) {
    if (device_) {
      rule_.set_step(rate_(step_), step_ + 1);
      device_->apply(keys, grads, rule_);
      is_written_ = true;
      return {};
    }
    const RouteView route = keys->route->view();
    open_ = std::make_shared<const Gradients>(Gradients{keys, grads});
    // Between nodes they are applied after the call, when the caller may have changed the gradients.
    reducer_.begin(step_, route, grads.at, !table_.channel->is_one_node());
    is_written_ = true;
    return {step_, route, {route.keys, nullptr, nullptr, nullptr, grads.at}, true, open_};
  }

  // Gradients for other nodes, with the request of the batch that is announced to be read next.
  std::shared_ptr<Request> posted(const Push& push) {
    if (ahead_.empty() || ahead_.front().request)
      return request(kPushes, std::make_shared<const Route>(table_.space->partition.size()), 0, {push});
    Announced& batch = ahead_.front();
    return batch.request = request(kAnnounced, batch.keys->remote_route, step_ + 1, {push});
  }

  // Waits for the gradients of all ranks in this step and applies them to this rank's rows.
  static void apply(const Clients& clients) {
    Clients open;
    for (ExactClient* client : clients)
      if (client->reducer_.is_open()) open.push_back(client);
    if (open.empty()) return;
    const InPart drain(*open[0]->table_.spans, kDrain);
    open[0]->exchange().publish();  // others may wait for this rank's gradients
    for (ExactClient* client : open) client->apply_step();
  }

  void apply_step() {
    table_.waits().wait([this] { return reducer_.poll(); },
                        [this] {
                          return Awaited{"in step " + std::to_string(step_ + 1) + " for the gradients of {}",
                                         {reducer_.awaited()}};
                        });
    rule_.set_step(rate_(step_), step_ + 1);
    reducer_.apply(rule_);
    open_ = nullptr;
  }

  Table table_;
  StepReducer reducer_;
  RowOptimizer rule_;
  Rate rate_;
  DeviceRows* device_;
  int64_t step_ = 0;
  bool is_written_ = false;
  std::deque<Announced> ahead_;
  std::shared_ptr<const Gradients> open_;  // of the step that is not applied yet
};

}  // namespace hetmpi
