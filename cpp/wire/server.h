// Server: answers the requests of the clients of this rank from a thread, which touches memory only: a request reaches
// its line (line.h) by one-sided calls, and its client fetches the reply in the same way.
//
// A message is the number of words of each table's section, then the sections (hetmpi/wire/rounds.py). Its pushes are
// applied, by this rank or by the owners to whose rings they go on, before its rows are read; at s = 0 those of all
// ranks. Requests of several clients wait side by side. A message of pushes alone gets no reply.
//
// Invariants:
//   what is behind lock_ is used while it is held, by the thread and by serve();
//   an error is kept and thrown by check(); nothing is served after it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "wire/line.h"
#include "wire/round.h"

namespace hetmpi {

class Server {
 public:
  // Both ways of one client, in this rank's memory.
  struct Lines {
    LineHeader *requests, *replies;  // each before its ring
  };

  // capacity: words of each ring.
  Server(const std::vector<Lines>& clients, int64_t capacity) {
    for (const Lines& client : clients) {
      clients_.push_back({client.requests, client.replies, LineReader(ring_of(client.requests), capacity),
                          LineWriter(ring_of(client.replies), capacity)});
    }
  }

  ~Server() { stop(); }

  // The tables, in the order of their sections; null for one that has left, whose memory is not used after this call.
  // REQUIRES: no request is under way where tables are added.
  void serve(std::vector<RoundServer*> tables) {
    std::lock_guard<std::mutex> hold(lock_);
    tables_ = std::move(tables);
    if (!thread_.joinable() && !clients_.empty()) thread_ = std::thread([this] { run(); });
  }

  // Ends the thread. May be called twice.
  void stop() {
    {
      std::lock_guard<std::mutex> hold(sleep_lock_);
      stops_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // Throws the error that has ended the service, if there is one.
  void check() {
    if (!has_failed_) return;
    std::lock_guard<std::mutex> hold(lock_);
    std::rethrow_exception(error_);
  }

 private:
  using Microseconds = std::chrono::microseconds;
  static constexpr Microseconds kShortest{20}, kWaiting{100}, kLongest{500};  // polling intervals

  struct Client {
    LineHeader *requests_header, *replies_header;
    LineReader requests;
    LineWriter replies;
    std::vector<int64_t> request;  // that is answered once it is ready; empty if there is none
    std::vector<int64_t> reply;    // not written yet from `num_written` on
    size_t num_written = 0;
  };

  static int64_t* ring_of(LineHeader* header) { return reinterpret_cast<int64_t*>(header + 1); }

  void run() {
    Microseconds pause = kShortest;
    while (!stops_ && !has_failed_) {
      {
        std::lock_guard<std::mutex> hold(lock_);
        try {
          pause = proceed() ? kShortest : std::min(2 * pause, waits_ ? kWaiting : kLongest);
        } catch (...) {
          error_ = std::current_exception();
          has_failed_ = true;
        }
      }
      std::unique_lock<std::mutex> hold(sleep_lock_);
      wake_.wait_for(hold, pause, [this] { return stops_.load(); });
    }
  }

  // Returns whether anything was done.
  bool proceed() {
    bool was_busy = false;
    for (size_t i = 0; i < clients_.size(); ++i) {
      Client& client = clients_[i];
      if (!client.reply.empty()) {
        was_busy |= write_reply(client);
      } else if (client.request.empty() && client.requests.read()) {
        take(i);
        was_busy = true;
      }
      client.requests_header->tail.store(client.requests.tail(), std::memory_order_release);
    }
    bool have_passed = true;
    for (RoundServer* table : tables_) have_passed &= table == nullptr || table->apply();
    if (have_passed) pushes_.clear();
    waits_ = !have_passed;
    for (size_t i = 0; i < clients_.size(); ++i) {
      if (clients_[i].request.empty()) continue;
      const bool is_ready = std::all_of(tables_.begin(), tables_.end(),
                                        [i](auto* table) { return table == nullptr || table->is_ready(i); });
      waits_ |= !is_ready;
      was_busy |= is_ready;
      if (is_ready) answer(i);
    }
    return was_busy;
  }

  // Takes the message that a client has sent.
  void take(size_t i) {
    std::vector<int64_t> message;
    message.swap(clients_[i].requests.message());
    const auto num_words = static_cast<int64_t>(message.size());
    auto begin = static_cast<int64_t>(tables_.size());
    RoundRequest::check_end(begin, num_words);
    bool is_answered = false;
    for (size_t table = 0; table < tables_.size(); ++table) {
      const int64_t length = message[table];
      if (length < 0 || length > num_words - begin) throw std::out_of_range("server: a section exceeds its message");
      if (length > 0 && tables_[table] != nullptr) {
        const auto* section = reinterpret_cast<const uint8_t*>(message.data() + begin);
        is_answered |= tables_[table]->take(i, section, length * kWord) != kPushes;
      }
      begin += length;
    }
    if (is_answered) {
      clients_[i].request = std::move(message);
    } else {
      pushes_.push_back(std::move(message));
    }
  }

  void answer(size_t i) {
    Client& client = clients_[i];
    std::vector<int64_t>& reply = client.reply;
    for (RoundServer* table : tables_) reply.push_back(table == nullptr ? 0 : table->reply_bytes(i) / kWord);
    auto begin = static_cast<int64_t>(tables_.size());
    reply.resize(std::accumulate(reply.begin(), reply.end(), begin));
    for (size_t table = 0; table < tables_.size(); ++table) {
      if (tables_[table] == nullptr) continue;
      tables_[table]->write_reply(i, reinterpret_cast<uint8_t*>(reply.data() + begin));
      begin += reply[table];
    }
    client.request.clear();
    write_reply(client);
  }

  // Returns whether there was room for a part of it.
  static bool write_reply(Client& client) {
    client.replies.set_tail(client.replies_header->tail.load(std::memory_order_acquire));
    const auto num_left = static_cast<int64_t>(client.reply.size() - client.num_written);
    const int64_t num = client.replies.write(client.reply.data() + client.num_written, num_left);
    client.num_written += num;
    if (num == num_left) {
      client.reply.clear();
      client.num_written = 0;
    }
    return num > 0;
  }

  std::vector<Client> clients_;
  std::vector<RoundServer*> tables_;
  std::vector<std::vector<int64_t>> pushes_;  // messages without reply, until all of them have been passed on
  bool waits_ = false;                        // for an owner
  std::exception_ptr error_;
  std::mutex lock_;  // of all above
  std::atomic<bool> has_failed_{false}, stops_{false};
  std::mutex sleep_lock_;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace hetmpi
