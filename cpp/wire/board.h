// Board: a message of every rank of a node to all its ranks, in memory that they share (hetmpi/comm/board.py).
//
// area    BoardHeader, then the message. One rank writes it, all ranks of the node read it.
//
// Invariants:
//   turn counts the messages posted; the message of a turn, num_words and kind stand before turn is stored, and until
//   the next message is written: the callers see to it that nobody reads by then.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

namespace hetmpi {

struct BoardHeader {
  alignas(64) std::atomic<int64_t> turn;
  int64_t num_words, kind;
};
static_assert(sizeof(BoardHeader) == 64 && std::atomic<int64_t>::is_always_lock_free);

class Board {
 public:
  // areas: of the node's ranks, of which number `own` is this rank's.
  Board(std::vector<BoardHeader*> areas, int64_t own) : areas_(std::move(areas)), own_(areas_.at(own)) {}

  // Shows this rank's message to all ranks.
  void post(int64_t turn, int64_t num_words, int64_t kind) {
    own_->num_words = num_words;
    own_->kind = kind;
    own_->turn.store(turn, std::memory_order_release);
  }

  // Whether all ranks have posted the message of this turn.
  bool is_posted(int64_t turn) const {
    for (const BoardHeader* area : areas_)
      if (area->turn.load(std::memory_order_acquire) < turn) return false;
    return true;
  }

  // Whether all messages are of one kind. REQUIRES: as num_words().
  bool is_of_one_kind() const {
    for (const BoardHeader* area : areas_)
      if (area->kind != own_->kind) return false;
    return true;
  }

  // Words of each message. REQUIRES: is_posted() of this turn returned true.
  std::vector<int64_t> num_words() const {
    std::vector<int64_t> found;
    for (const BoardHeader* area : areas_) found.push_back(area->num_words);
    return found;
  }

 private:
  std::vector<BoardHeader*> areas_;
  BoardHeader* own_;
};

}  // namespace hetmpi
