// Sums: gradients on their way from this rank to their owners, at s >= 1.
//
// The lines release sums; send() passes them to the owners of this node, by rings, and holds those for other nodes
// until the next request leaves, which carries them. So a gradient is, at any time, in one of these places: pending in
// a line; released by the lines; held here; a request on its wire, or taken by its server; a ring of this rank, or of
// that server, at the owner; the row.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "client/client.h"
#include "owner/push_applier.h"

namespace hetmpi {

// Sums of one send().
struct SentSums {
  int64_t step;
  std::shared_ptr<ReleasedSums> sums;
  Route route;  // of their keys
};

// Their push, which keeps them.
inline Push push_of(const std::shared_ptr<const SentSums>& sent, RecordFormat format) {
  const auto& [step, sums, route] = *sent;
  const auto* steps = reinterpret_cast<const int32_t*>(sums->steps.data());
  const PushColumns columns{route.keys().data(), sums->clocks.data(), sums->counts.data(),
                            format.has_steps ? steps : nullptr, sums->sums.data()};
  return {step, route.view(), columns, false, sent};
}

class Sums {
 public:
  static constexpr int kMostIdle = 8;  // successive writes without a request

  using Held = std::vector<std::shared_ptr<SentSums>>;

  Sums(const Table* table, PushApplier* applier) : table_(table), applier_(applier) {}

  // Those for other nodes since the last request.
  const Held& held() const { return held_; }

  // Sends the owners all sums that the lines have released, or the late ones. step: of this rank.
  void send(int64_t step, bool late = false) {
    if (table_->lines->num_released(late) == 0) return;
    std::shared_ptr<ReleasedSums> taken = table_->lines->take(late);
    Route route(table_->space->partition, taken->keys.data(), taken->keys.size());
    const auto sent = std::make_shared<SentSums>(SentSums{step, std::move(taken), std::move(route)});
    const Push push = push_of(sent, table_->channel->format);
    PushColumns own = push.columns;
    const int64_t begin = push.route.first[table_->rank()];
    own.keys += begin;
    applier_->apply(own, push.route.order + begin, push.route.num(table_->rank()));
    if (has_remote(push.route)) held_.push_back(sent);
    send_on_node(*table_, push);
    table_->counters->pushed += sent->sums->keys.size();
  }

  // The held sums, for a request; forget_held() once it has left.
  std::vector<Push> pushes() const {
    std::vector<Push> pushes;
    for (const auto& sent : held_) pushes.push_back(push_of(sent, table_->channel->format));
    return pushes;
  }

  void forget_held() {
    held_.clear();
    num_idle_ = 0;
  }

  // Counts a write that no request preceded. Returns whether kMostIdle were made so, which bounds what is held: flush()
  // must follow.
  bool count_idle() { return ++num_idle_ == kMostIdle && !table_->channel->is_one_node(); }

  // Sends the held sums to their owners, and waits until these have applied them. REQUIRES: no request of this table is
  // under way.
  void send_held(int64_t bound) {
    if (table_->channel->is_one_node()) return;
    const auto none = std::make_shared<const Route>(table_->space->partition.size());
    const RequestHeader header{kFlush, bound, 0};
    const auto request = std::make_shared<Request>(*table_->channel, header, none, pushes());
    Exchange& exchange = *table_->channel->exchange;
    exchange.ask({request});
    forget_held();
    exchange.drop(*request);
  }

  // Waits until the owners of this node have applied all sums that this rank sent.
  void await_all(int64_t step) {
    table_->waits().wait([this] { return behind().empty(); },
                         [this, step] {
                           return Awaited{"in step " + std::to_string(step + 1) + " for {} to apply its gradients",
                                          behind()};
                         });
  }

 private:
  bool has_remote(const RouteView& route) const {
    for (size_t rank = 0; rank < table_->space->is_remote.size(); ++rank)
      if (table_->space->is_remote[rank] && route.num(rank) > 0) return true;
    return false;
  }

  // Owners of this node that have not applied everything sent.
  Ranks behind() const {
    Ranks ranks;
    for (size_t rank = 0; rank < table_->rings.size(); ++rank)
      if (table_->rings[rank] && !table_->rings[rank]->is_drained()) ranks.push_back(rank);
    return ranks;
  }

  const Table* table_;
  PushApplier* applier_;
  Held held_;
  int num_idle_ = 0;  // writes since the last request
};

}  // namespace hetmpi
