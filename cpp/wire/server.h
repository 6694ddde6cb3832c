// Server: takes the messages of the clients of this rank, has their pushes applied, and makes the replies. It does no
// I/O and never waits: whoever receives messages puts them in, calls proceed(), and sends what take() returns. By
// messages that is the rank's main thread (exchange.h), by windows a thread of its own (window_thread.h).
//
// A message has a section of each table (sections.h). Its pushes are applied, by this rank or by the owners to whose
// rings they go on, before its rows are read; at s = 0 those of all ranks. A message of pushes alone gets no reply.
//
// Policies:
//   as they come   a client's messages are taken in the order in which it sent them
//   in rounds      all ranks make the same calls in the same order. A client's n-th message is taken once expect() has
//                  said what this rank's own n-th is; another call of the client is an error. Where requests have
//                  clocks, so that pushes are applied one by one, a round is taken in the order of ranks and then
//                  answered: so a run with one rank per node repeats its bits
//
// Invariants: all that changes is used while lock_ is held.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "wire/request.h"
#include "wire/sections.h"

namespace hetmpi {

constexpr int64_t kNoSection = -2;  // the reason of a table that takes no part in a message

class Server {
 public:
  // ranks: of the clients, ascending; own: this rank. in_rounds: the policy.
  Server(std::vector<int64_t> ranks, int64_t own, bool in_rounds)
      : ranks_(std::move(ranks)), own_(own), in_rounds_(in_rounds), clients_(ranks_.size()) {}

  size_t num_clients() const { return ranks_.size(); }

  // The tables, in the order of their sections; null for one that has left, whose memory is not used after this call.
  // REQUIRES: no message is under way where tables are added.
  void set_tables(std::vector<TableServer*> tables) {
    std::lock_guard<std::mutex> hold(lock_);
    tables_ = std::move(tables);
  }

  // Words of the message that begins with these words (n), of which there may be more; none if they are too few to
  // tell.
  std::optional<int64_t> length_of(const int64_t* begin, int64_t n) {
    std::lock_guard<std::mutex> hold(lock_);
    const auto num_tables = static_cast<int64_t>(tables_.size());
    if (n < num_tables) return std::nullopt;
    return message_words(begin, num_tables);
  }

  // In rounds: the reason of each table in this rank's next message.
  void expect(std::vector<int64_t> reasons) {
    std::lock_guard<std::mutex> hold(lock_);
    if (!clients_.empty()) expected_.push_back(std::move(reasons));
  }

  // A message that a client has sent, after those before.
  void put(size_t client, Words message) {
    std::lock_guard<std::mutex> hold(lock_);
    clients_.at(client).received.push_back(std::move(message));
  }

  // Takes, applies and answers what can be. Returns whether anything was done.
  bool proceed() {
    std::lock_guard<std::mutex> hold(lock_);
    if (tables_.empty()) return false;  // another rank has made its first table before this one
    bool was_busy = take_messages(), have_passed = true;
    for (TableServer* table : tables_) have_passed &= table == nullptr || table->apply();
    if (have_passed) pushes_.clear();
    waits_ = !have_passed;
    for (size_t i = 0; i < clients_.size(); ++i) {
      while (!clients_[i].due.empty() && is_ready(i)) {
        answer(i);
        was_busy = true;
      }
      waits_ |= !clients_[i].due.empty();
    }
    return was_busy;
  }

  // Moves the next reply to a client to *reply, if one is made.
  bool take(size_t client, Words* reply) {
    std::lock_guard<std::mutex> hold(lock_);
    std::deque<Words>& replies = clients_.at(client).replies;
    if (replies.empty()) return false;
    *reply = std::move(replies.front());
    replies.pop_front();
    return true;
  }

  // Whether a client has no message here that is not taken, or not answered.
  bool is_free(size_t client) {
    std::lock_guard<std::mutex> hold(lock_);
    const Client& of = clients_.at(client);
    return of.received.empty() && of.due.empty() && of.replies.empty();
  }

  // Replies made to each client, at least.
  int64_t num_answered() {
    std::lock_guard<std::mutex> hold(lock_);
    int64_t least = clients_.empty() ? 0 : clients_.front().num_answered;
    for (const Client& client : clients_) least = std::min(least, client.num_answered);
    return least;
  }

  // Whether pushes or requests that are taken wait for an owner.
  bool waits() {
    std::lock_guard<std::mutex> hold(lock_);
    return waits_;
  }

 private:
  using Tables = std::vector<char>;  // whether each table has a section in a reply

  struct Client {
    std::deque<Words> received;  // not taken yet
    std::deque<Tables> due;      // replies that are not made
    std::deque<Words> replies;   // not sent
    Words request;               // with clocks, which its table reads until it is answered
    int64_t num_taken = 0, num_answered = 0;
  };

  bool any_is_bounded() const {
    return std::any_of(tables_.begin(), tables_.end(), [](const auto* table) { return table && !table->is_exact(); });
  }

  bool take_messages() {
    bool was_busy = false;
    if (in_rounds_ && any_is_bounded()) {
      while (is_round_whole()) {
        for (size_t i = 0; i < clients_.size(); ++i) take_next(i);
        was_busy = true;
      }
      return was_busy;
    }
    for (size_t i = 0; i < clients_.size(); ++i) {
      while (is_next_due(i)) {
        take_next(i);
        was_busy = true;
      }
    }
    return was_busy;
  }

  bool is_next_due(size_t i) const {
    const Client& client = clients_[i];
    if (client.received.empty() || client.request.num > 0) return false;
    return !in_rounds_ || client.num_taken < num_forgotten_ + static_cast<int64_t>(expected_.size());
  }

  bool is_round_whole() const {
    for (size_t i = 0; i < clients_.size(); ++i)
      if (!is_next_due(i) || clients_[i].num_taken != clients_[0].num_taken) return false;
    return !clients_.empty();
  }

  void take_next(size_t i) {
    Client& client = clients_[i];
    Words message = std::move(client.received.front());
    client.received.pop_front();
    const std::vector<Section> sections = sections_of(message.at, message.num, static_cast<int64_t>(tables_.size()));
    Tables reply(tables_.size());
    for (size_t table = 0; table < tables_.size(); ++table) {
      const auto [at, num_words] = sections[table];
      int64_t reason = kNoSection;
      if (num_words > 0 && tables_[table] != nullptr) {
        reason = tables_[table]->take(i, reinterpret_cast<const uint8_t*>(at), num_words * kWord);
        reply[table] = reason != kPushes;
      }
      if (in_rounds_ && tables_[table] != nullptr) check_same(i, table, reason);
    }
    if (std::count(reply.begin(), reply.end(), 1) > 0) client.due.push_back(std::move(reply));
    ++client.num_taken;
    forget_expected();
    if (!client.due.empty() && any_is_bounded()) {
      client.request = std::move(message);
    } else {
      pushes_.push_back(std::move(message));
    }
  }

  // In rounds: a client's message must be of the same call as this rank's.
  void check_same(size_t i, size_t table, int64_t theirs) const {
    const int64_t ours = expected_.at(clients_[i].num_taken - num_forgotten_).at(table);
    if (theirs == ours) return;
    const bool both = theirs != kNoSection && ours != kNoSection;
    const auto text = [both](int64_t reason) -> std::string {
      if (!both) return reason == kNoSection ? "does not use the table" : "uses a table";
      return reason == kPushes ? "announces none" : kReasonTexts[reason];
    };
    throw std::runtime_error("EmbeddingTable: rank " + std::to_string(ranks_[i]) + " " + text(theirs) + " while rank " +
                             std::to_string(own_) + " " + text(ours) +
                             ": with table.exchange=messages all ranks must read, announce, write and flush alike");
  }

  void forget_expected() {
    if (!in_rounds_) return;
    int64_t least = clients_.front().num_taken;
    for (const Client& client : clients_) least = std::min(least, client.num_taken);
    for (; num_forgotten_ < least; ++num_forgotten_) expected_.pop_front();
  }

  bool is_ready(size_t i) const {
    const Tables& reply = clients_[i].due.front();
    for (size_t table = 0; table < tables_.size(); ++table)
      if (reply[table] && tables_[table] != nullptr && !tables_[table]->is_ready(i)) return false;
    return true;
  }

  void answer(size_t i) {
    Client& client = clients_[i];
    const Tables of = std::move(client.due.front());
    client.due.pop_front();
    const size_t num_tables = tables_.size();
    std::vector<int64_t> lengths(num_tables);
    for (size_t table = 0; table < num_tables; ++table)
      if (of[table] && tables_[table] != nullptr) lengths[table] = tables_[table]->reply_bytes(i) / kWord;
    client.replies.push_back(message_of_sections(lengths, [&](size_t table, int64_t* at) {
      if (of[table] && tables_[table] != nullptr) tables_[table]->write_reply(i, reinterpret_cast<uint8_t*>(at));
    }));
    client.request = {};
    ++client.num_answered;
  }

  const std::vector<int64_t> ranks_;
  const int64_t own_;
  const bool in_rounds_;
  std::vector<Client> clients_;
  std::vector<TableServer*> tables_;
  std::deque<std::vector<int64_t>> expected_;  // of this rank's messages that not all clients' are taken of
  int64_t num_forgotten_ = 0;                  // of those before
  std::vector<Words> pushes_;                  // whose pushes may not all be applied or passed on yet
  bool waits_ = false;
  std::mutex lock_;
};

}  // namespace hetmpi
