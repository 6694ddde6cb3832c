// Exchange: the messages of several tables between nodes, on a wire.
//
//   round   a request to every server, and a reply to every client
//   post    a message to every server, with gradients; if tables announce batches by it, with replies as well
//
// A message has a section of each table (sections.h); tables that are used together share it. A server (server.h)
// answers the messages of this rank's clients. Where the wire has no thread that runs it, all ranks make the same calls
// in the same order, and every wait receives and answers. In a round all ranks send their requests before any of them
// waits for a reply. A rank leaves a write only after it has answered every client in all rounds that it has begun by
// then: what follows, such as a sum over all ranks, may receive nothing. Nor may a sum between read and write: a round
// begun there is awaited by nobody before its own write.
//
// It does no I/O: Wire carries words and Waits waits, both given by the rank (hetmpi/wire/wire.py, World.wait).
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "buffer.h"
#include "wire/request.h"
#include "wire/sections.h"
#include "wire/server.h"

namespace hetmpi {

constexpr int64_t kRequestTag = 1, kReplyTag = 2, kPostTag = 3;

using Ranks = std::vector<int64_t>;

// A message to a partner, or from one.
struct Addressed {
  int64_t partner;
  Words words;
};

// As hetmpi/wire/wire.py, Wire.
class Wire {
 public:
  virtual ~Wire() = default;
  virtual void send(int64_t tag, std::vector<Addressed> messages) = 0;
  virtual void expect(int64_t tag, const Ranks& partners) = 0;
  virtual std::vector<Addressed> arrived(int64_t tag, const Ranks& partners) = 0;
  virtual bool publish() = 0;
};

// What a rank waits for, for its messages: "{}" in the text stands for the ranks.
struct Awaited {
  std::string text;
  Ranks ranks;
};

// Waits of a rank, which receives for all of its tables meanwhile.
class Waits {
 public:
  virtual ~Waits() = default;
  // Returns once look() is true.
  virtual void wait(const std::function<bool()>& look, const std::function<Awaited()>& what) = 0;
};

class Exchange;

// One table's part of the messages, on this rank.
struct Channel {
  Exchange* exchange;
  TableServer* server;        // answers the requests of this rank's clients
  std::vector<Ranks> owners;  // on the node of each server
  RecordFormat format;        // of a push
  std::vector<int64_t> dims;  // of the arrays of a row in a reply
  bool is_exact;              // read at s = 0
  bool is_collective;         // all ranks must make the same calls in the same order

  bool is_one_node() const { return owners.empty(); }
  // Whether anybody needs a request for a route's keys, all of other nodes: at s = 0 not without keys, unless others
  // wait for it.
  bool must_ask(const Route& route) const { return !is_one_node() && (!is_exact || is_collective || route.size() > 0); }
};

// What a table asks of the owners on other nodes, and their replies.
class Request {
 public:
  // route: the requested keys, at their positions in a batch of n. pushes: that owners apply before they answer. known:
  // at s >= 1, (n) the clocks of this rank's copies of these keys, kNoLine without a usable one; owner_clocks: then
  // (n), which gets the owners' clocks.
  Request(const Channel& channel, RequestHeader header, std::shared_ptr<const Route> route, std::vector<Push> pushes,
          Buffer<int32_t> known = {}, Buffer<int32_t> owner_clocks = {})
      : channel_(&channel),
        header_(header),
        route_(std::move(route)),
        known_(std::move(known)),
        owner_clocks_(std::move(owner_clocks)),
        core_(route_->view(), channel.is_exact ? nullptr : known_.data(), header, std::move(pushes), channel.format,
              channel.dims) {}

  const Channel& channel() const { return *channel_; }
  Exchange& exchange() const { return *channel_->exchange; }
  int64_t reason() const { return header_.reason; }
  int64_t step() const { return header_.step; }
  // Of the round that awaits the replies, once the request is sent; else -1.
  int64_t round() const { return round_; }
  // The rows that the replies bring: (n), once they are received; empty at s = 0, where they bring all.
  const std::vector<uint8_t>& fetched() const { return fetched_; }
  // Of these rows.
  int64_t num_bytes() const { return num_bytes_; }
  int64_t num_positions() const { return route_->num_positions(); }

  // Copies the rows to their positions, outs[a] (n, dims[a]), and frees the replies. Throws std::out_of_range if they
  // are not here.
  void place(const std::vector<float*>& outs) {
    for (size_t i = 0; i < channel_->owners.size(); ++i)
      core_.place(channel_->owners[i], bytes_of(i), kWord * sections_[i].num_words, outs);
    sections_.clear();
    replies_.clear();
  }

 private:
  friend class Exchange;

  const uint8_t* bytes_of(size_t server) const { return reinterpret_cast<const uint8_t*>(sections_.at(server).at); }

  int64_t num_words(size_t server) const { return core_.bytes(channel_->owners.at(server)) / kWord; }
  void write(size_t server, int64_t* at) const {
    core_.write(channel_->owners[server], reinterpret_cast<uint8_t*>(at));
  }

  // Frees the memory of gradients that have left.
  void forget_pushes() { core_.forget_pushes(); }

  // One more server's reply: this table's section of a message.
  void add_reply(Section section, Words message) {
    sections_.push_back(section);
    replies_.push_back(std::move(message));
  }

  // Reads the clocks, once all replies are here.
  void read() {
    if (channel_->is_exact) return;
    fetched_.assign(num_positions(), 0);
    for (size_t i = 0; i < replies_.size(); ++i)
      core_.read_clocks(channel_->owners.at(i), bytes_of(i), kWord * sections_[i].num_words, owner_clocks_.data(),
                        fetched_.data());
    int64_t width = 0;
    for (const int64_t dim : channel_->dims) width += dim;
    num_bytes_ = sizeof(float) * width * std::count(fetched_.begin(), fetched_.end(), 1);
  }

  const Channel* channel_;
  RequestHeader header_;
  std::shared_ptr<const Route> route_;
  Buffer<int32_t> known_, owner_clocks_;
  RequestLayout core_;
  int64_t round_ = -1, num_bytes_ = 0;
  std::vector<Section> sections_;  // of each server's reply
  std::vector<Words> replies_;
  std::vector<uint8_t> fetched_;
};

class Exchange {
 public:
  using Requests = std::vector<std::shared_ptr<Request>>;

  // servers: of this rank; clients: those whose messages this rank receives itself. What is given must live as long.
  Exchange(Waits* waits, Wire* wire, Server* server, Ranks servers, Ranks clients)
      : waits_(waits),
        wire_(wire),
        server_(server),
        servers_(std::move(servers)),
        clients_(std::move(clients)),
        num_received_(clients_.size()) {}

  // Adds a channel. REQUIRES: no message is under way, on any rank.
  void join(Channel* channel) {
    channel->exchange = this;
    channels_.push_back(channel);
    is_exact_ = channel->is_exact;  // as of all that share messages
    set_tables();
  }

  // Removes a channel, whose section stays empty: its table's memory is not used any more. Returns false, and does
  // nothing, if it is the last one.
  bool remove(const Channel* channel) {
    const auto num = std::count_if(channels_.begin(), channels_.end(), [](const Channel* of) { return of != nullptr; });
    if (num == 1) return false;
    const size_t section = section_of(*channel);
    channels_[section] = nullptr;
    for (Round& round : rounds_) round.requests[section] = nullptr;
    set_tables();
    return true;
  }

  Waits& waits() const { return *waits_; }

  // An error, or different calls of ranks, has ended the messages: none is awaited any more.
  bool is_broken() const { return is_broken_; }
  int64_t num_messages() const { return num_messages_; }  // sent so far
  int64_t num_bytes() const { return num_bytes_; }

  // Throws std::runtime_error if an error has ended the messages.
  void check() const {
    if (is_broken_)
      throw std::runtime_error("EmbeddingTable: an error has ended the messages between nodes: close the table");
  }

  // Whether replies to a channel are not received yet.
  bool awaits(const Channel* channel) const {
    const auto is_awaited = [channel](const Round& round) {
      return std::any_of(round.requests.begin(), round.requests.end(),
                         [channel](const auto& request) { return request && &request->channel() == channel; });
    };
    return !is_broken_ && std::any_of(rounds_.begin(), rounds_.end(), is_awaited);
  }

  // Sends every server the requests of some channels. Throws as check().
  void ask(const Requests& requests) {
    check();
    if (!requests.empty()) send(kRequestTag, requests);
  }

  // Sends every server gradients of channels, and what those request that are for another reason than kPushes. All
  // ranks post equally often.
  void post(const Requests& requests) {
    send(kPostTag, requests);
    for (const auto& request : requests) request->forget_pushes();
  }

  // Lets messages leave, and receives and answers those of clients. Returns whether all that this rank has sent have
  // come from each client too.
  bool poll() {
    wire_->publish();
    if (clients_.empty() || is_broken_) return tags_.empty();
    while (take_messages()) continue;
    breaking([this] {
      server_->proceed();
      send_replies();
    });
    return tags_.empty();
  }

  // Receives the replies of all rounds.
  void receive_all() { receive(num_rounds_ - 1); }

  // Answers all clients in this round and those before it. Throws as check().
  void serve(int64_t number) {
    check();
    for (size_t i = 0; i < rounds_.size() && rounds_[i].number <= number; ++i) {
      if (rounds_[i].is_served) continue;
      if (!clients_.empty()) answer_clients(rounds_[i]);
      wire_->expect(kReplyTag, servers_);
      rounds_[i].is_served = true;
    }
  }

  // Receives the replies of this round and those before it. Throws as check().
  void receive(int64_t number) {
    serve(number);
    while (!rounds_.empty() && rounds_.front().number <= number) {
      Round& round = rounds_.front();
      const auto look = [&] {
        for (Addressed& message : wire_->arrived(kReplyTag, missing_in(round)))
          round.replies[place_of(servers_, message.partner)] = std::move(message.words);
        return missing_in(round).empty();
      };
      waits_->wait(look, [&] { return calls_of(missing_in(round)); });
      breaking([&] { read(round); });
      rounds_.pop_front();
    }
    publish();  // another rank may need the reply before it can come to this rank's next call
  }

  // Waits until all messages have left.
  void publish() {
    waits_->wait([this] { return wire_->publish(); },
                 [] { return Awaited{"for other ranks to make room for its messages", {}}; });
  }

  // Ends a request in any state. Completes its round: other ranks wait for this rank's replies, and theirs must be
  // received.
  void drop(const Request& request) {
    if (request.round() >= 0 && !is_broken_) receive(request.round());
  }

 private:
  // The replies that this rank awaits from every server to one of its messages.
  struct Round {
    int64_t number;              // of the rounds before it
    Requests requests;           // by section, null for a table that awaits none
    std::vector<Words> replies;  // of each server, empty where it is not here
    bool is_served = false;
  };

  // Calls what reads messages: after an error in it they are gone, so that none can be awaited.
  template <typename Reads>
  void breaking(Reads reads) {
    try {
      reads();
    } catch (...) {
      is_broken_ = true;
      throw;
    }
  }

  // Gives each table its part of the replies of all servers.
  static void read(const Round& round) {
    for (const Words& message : round.replies) {
      const auto sections = sections_of(message.at, message.num, static_cast<int64_t>(round.requests.size()));
      for (size_t table = 0; table < sections.size(); ++table)
        if (round.requests[table]) round.requests[table]->add_reply(sections[table], message);
    }
    for (const auto& request : round.requests)
      if (request) request->read();
  }

  static size_t place_of(const Ranks& ranks, int64_t rank) {
    const auto at = std::find(ranks.begin(), ranks.end(), rank);
    if (at == ranks.end()) throw std::out_of_range("a wire brought a message of a rank that is no partner");
    return at - ranks.begin();
  }

  void set_tables() {
    std::vector<TableServer*> tables;
    for (const Channel* channel : channels_) tables.push_back(channel ? channel->server : nullptr);
    server_->set_tables(std::move(tables));
  }

  // Throws std::runtime_error for a channel of another exchange.
  size_t section_of(const Channel& channel) const {
    const auto at = std::find(channels_.begin(), channels_.end(), &channel);
    if (at == channels_.end())
      throw std::runtime_error("TableGroup: a table of this group was put into another group since: use that one");
    return at - channels_.begin();
  }

  // By section, null where a table takes no part. Throws as section_of().
  Requests by_section(const Requests& requests) const {
    Requests found(channels_.size());
    for (const auto& request : requests) {
      if (!request) throw std::invalid_argument("ask and post take Requests, got None");
      found[section_of(request->channel())] = request;
    }
    return found;
  }

  // Sends a message to every server, and begins a round if it awaits replies.
  void send(int64_t tag, const Requests& requests) {
    Requests sections = by_section(requests);
    std::vector<Addressed> messages;
    for (size_t i = 0; i < servers_.size(); ++i) messages.push_back({servers_[i], message_to(i, sections)});
    count(messages);
    std::vector<int64_t> reasons = reasons_of(sections);
    begin_round(std::move(sections));
    wire_->send(tag, std::move(messages));
    if (clients_.empty()) return;
    tags_.push_back(tag);
    if (is_exact_) server_->expect(std::move(reasons));
    wire_->expect(tag, clients_);
  }

  static Words message_to(size_t server, const Requests& sections) {
    std::vector<int64_t> lengths;
    for (const auto& request : sections) lengths.push_back(request ? request->num_words(server) : 0);
    return message_of_sections(lengths, [&](size_t table, int64_t* at) {
      if (sections[table]) sections[table]->write(server, at);
    });
  }

  void begin_round(Requests sections) {
    bool awaits_any = false;
    for (auto& request : sections) {
      if (request && request->reason() == kPushes) request = nullptr;
      if (!request) continue;
      request->round_ = num_rounds_;
      awaits_any = true;
    }
    if (awaits_any) rounds_.push_back({num_rounds_++, std::move(sections), std::vector<Words>(servers_.size())});
  }

  static std::vector<int64_t> reasons_of(const Requests& sections) {
    std::vector<int64_t> reasons;
    for (const auto& request : sections) reasons.push_back(request ? request->reason() : kNoSection);
    return reasons;
  }

  void count(const std::vector<Addressed>& messages) {
    num_messages_ += static_cast<int64_t>(messages.size());
    for (const Addressed& message : messages) num_bytes_ += kWord * message.words.num;
  }

  // Gives the server the next message of each client from whom it is here. Returns whether there was one.
  bool take_messages() {
    bool has_found = false;
    for (const int64_t tag : {kRequestTag, kPostTag}) {
      Ranks awaited;
      for (size_t i = 0; i < clients_.size(); ++i)
        if (num_received_[i] < tags_.size() && tags_[num_received_[i]] == tag) awaited.push_back(clients_[i]);
      if (awaited.empty()) continue;
      for (Addressed& message : wire_->arrived(tag, awaited)) {
        const size_t i = place_of(clients_, message.partner);
        ++num_received_[i];
        server_->put(i, std::move(message.words));
        has_found = true;
      }
    }
    while (!tags_.empty() && *std::min_element(num_received_.begin(), num_received_.end()) > 0) {
      tags_.pop_front();
      for (size_t& num : num_received_) --num;
    }
    return has_found;
  }

  void send_replies() {
    for (;;) {  // the next one of each client
      std::vector<Addressed> replies;
      Words reply;
      for (size_t i = 0; i < clients_.size(); ++i)
        if (server_->take(i, &reply)) replies.push_back({clients_[i], std::move(reply)});
      if (replies.empty()) return;
      count(replies);
      wire_->send(kReplyTag, std::move(replies));
    }
  }

  void answer_clients(const Round& round) {
    if (!is_exact_) server_->expect(reasons_of(round.requests));  // their pushes are applied now, at this place
    // By messages a client's n-th request is part of every rank's n-th round.
    waits_->wait([&] { return poll(), server_->num_answered() > round.number; }, [&] { return unserved(); });
  }

  static Awaited calls_of(Ranks ranks) {
    return {"for {} to read or write the table as often as it does", std::move(ranks)};
  }

  Awaited unserved() const {
    Ranks missing;
    for (size_t i = 0; i < clients_.size(); ++i)
      if (num_received_[i] < tags_.size()) missing.push_back(clients_[i]);
    if (missing.empty()) return {"for the other ranks of its node to apply gradients", {}};
    return calls_of(missing);
  }

  Ranks missing_in(const Round& round) const {
    Ranks missing;
    for (size_t i = 0; i < servers_.size(); ++i)
      if (round.replies[i].at == nullptr) missing.push_back(servers_[i]);
    return missing;
  }

  Waits* waits_;
  Wire* wire_;
  Server* server_;
  const Ranks servers_, clients_;
  std::vector<Channel*> channels_;  // in the order of their sections; null for one that has left
  bool is_exact_ = false, is_broken_ = false;
  int64_t num_messages_ = 0, num_bytes_ = 0;
  std::deque<Round> rounds_;  // not received yet
  int64_t num_rounds_ = 0;
  std::deque<int64_t> tags_;          // of this rank's messages of which not all clients' are received
  std::vector<size_t> num_received_;  // of these, from each client
};

// Copies the rows, as they are after `step` steps at s = 0, of a route's keys, all of other nodes, to their positions
// in out (n, dims[0]).
inline void fetch(const Channel& channel, const std::shared_ptr<const Route>& route, int64_t step, float* out) {
  if (!channel.must_ask(*route)) return;
  const int64_t n = route->num_positions();
  std::vector<std::vector<float>> others;  // arrays of a row
  std::vector<float*> outs{out};
  for (size_t a = 1; a < channel.dims.size(); ++a) outs.push_back(others.emplace_back(n * channel.dims[a]).data());
  Buffer<int32_t> known, owner_clocks;
  if (!channel.is_exact) {
    known = Buffer<int32_t>::of(n);
    owner_clocks = Buffer<int32_t>::of(n);
    std::fill(known.begin(), known.end(), kNoLine);
  }
  const RequestHeader header{kPeek, 0, step};
  const auto request = std::make_shared<Request>(channel, header, route, std::vector<Push>(), known, owner_clocks);
  Exchange& exchange = *channel.exchange;
  exchange.ask({request});
  exchange.receive(request->round());
  request->place(outs);
}

}  // namespace hetmpi
