// WindowThread: receives and answers for a Server (server.h) from a thread, which touches memory only: a client's
// messages reach its pipe (pipe.h) by one-sided calls, and it fetches the replies in the same way.
//
// Invariants: an error is kept and thrown by check(); nothing is received after it.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "wire/pipe.h"
#include "wire/server.h"

namespace hetmpi {

class WindowThread {
 public:
  // Both ways of one client, in this rank's memory.
  struct Pipes {
    PipeHeader *requests, *replies;  // each before its ring
  };

  // clients: in the order of the server's, which must live as long. capacity: words of each ring.
  WindowThread(Server* server, const std::vector<Pipes>& clients, int64_t capacity) : server_(server) {
    for (const Pipes& client : clients) {
      clients_.push_back({client.requests, client.replies, PipeReader(ring_of(client.requests), capacity),
                          PipeWriter(ring_of(client.replies), capacity)});
    }
    if (!clients_.empty()) thread_ = std::thread([this] { run(); });
  }

  ~WindowThread() { stop(); }

  // Ends the thread. May be called twice.
  void stop() {
    {
      std::lock_guard<std::mutex> hold(sleep_lock_);
      stops_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  // Throws the error that has ended the thread, if there is one.
  void check() const {
    if (has_failed_.load(std::memory_order_acquire)) std::rethrow_exception(error_);
  }

 private:
  using Microseconds = std::chrono::microseconds;
  static constexpr Microseconds kShortest{20}, kWaiting{100}, kLongest{500};  // polling intervals

  struct Client {
    PipeHeader *requests_header, *replies_header;
    PipeReader requests;
    PipeWriter replies;
    Words reply{};  // not written yet from `num_written` on
    int64_t num_written = 0;
  };

  static int64_t* ring_of(PipeHeader* header) { return reinterpret_cast<int64_t*>(header + 1); }

  void run() {
    Microseconds pause = kShortest;
    while (!stops_ && !has_failed_) {
      try {
        pause = proceed() ? kShortest : std::min(2 * pause, server_->waits() ? kWaiting : kLongest);
      } catch (...) {
        error_ = std::current_exception();
        has_failed_.store(true, std::memory_order_release);
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
      if (client.reply.num > 0) {
        was_busy |= write_reply(client);
      } else if (server_->is_free(i) && client.requests.read()) {
        server_->put(i, words_of(std::move(client.requests.message())));
        was_busy = true;
      }
      client.requests_header->tail.store(client.requests.tail(), std::memory_order_release);
    }
    was_busy |= server_->proceed();
    for (size_t i = 0; i < clients_.size(); ++i)
      if (clients_[i].reply.num == 0 && server_->take(i, &clients_[i].reply)) was_busy |= write_reply(clients_[i]);
    return was_busy;
  }

  // Returns whether there was room for a part of it.
  static bool write_reply(Client& client) {
    client.replies.set_tail(client.replies_header->tail.load(std::memory_order_acquire));
    const int64_t num_left = client.reply.num - client.num_written;
    const int64_t num = client.replies.write(client.reply.at + client.num_written, num_left);
    client.num_written += num;
    if (num == num_left) {
      client.reply = {};
      client.num_written = 0;
    }
    return num > 0;
  }

  Server* server_;
  std::vector<Client> clients_;
  std::exception_ptr error_;  // written before has_failed_
  std::atomic<bool> has_failed_{false}, stops_{false};
  std::mutex sleep_lock_;
  std::condition_variable wake_;
  std::thread thread_;
};

}  // namespace hetmpi
