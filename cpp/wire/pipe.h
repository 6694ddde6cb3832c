// Pipe: messages of 8-byte words one way between two ranks, through a ring in the memory of one of them, the server.
// The other, its client, reaches the ring by one-sided calls: it copies what it has written to a mirror into the ring,
// or the ring into a mirror from which it reads (hetmpi/wire/windows.py).
//
// A message is sent in frames: a FrameHeader, then words, padded to kFrameWords. A frame does not wrap; one without
// words fills the end of the ring. Copies of a frame's bytes may arrive in any order: its reader takes it once its
// number is the next one and its checksum is that of its words.
//
// Invariants:
//   head counts the words ever written, tail those that the reader has taken; tail <= head <= tail + capacity;
//   one writer, one reader; the writer overwrites only words before tail + capacity - (their distance to head).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "key_index.h"

namespace hetmpi {

struct FrameHeader {
  int64_t number;     // of the frame on its pipe, from 1
  int64_t num_words;  // of this frame
  int64_t num_left;   // words of the message in later frames
  uint64_t checksum;  // of all above, and the words
};

constexpr int64_t kFrameWords = sizeof(FrameHeader) / sizeof(int64_t);
inline int64_t frame_words(int64_t num_words) {
  return kFrameWords + (num_words + kFrameWords - 1) / kFrameWords * kFrameWords;
}

// Before a ring in the server's memory.
struct alignas(64) PipeHeader {
  std::atomic<int64_t> tail;
};
static_assert(sizeof(PipeHeader) == 64 && std::atomic<int64_t>::is_always_lock_free);

// Each word changes the sum: a lane is multiplied by an odd number after a word is added to it.
inline uint64_t checksum_of(const FrameHeader& header, const int64_t* words) {
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15ULL;
  constexpr int kLanes = 4;  // independent, as a multiplication takes as long as several begin
  const auto number = static_cast<uint64_t>(header.number);
  uint64_t lanes[kLanes] = {number, ~number, static_cast<uint64_t>(header.num_words),
                            static_cast<uint64_t>(header.num_left)};
  const auto add = [&](uint64_t& lane, int64_t word) {
    lane = ((lane << 29 | lane >> 35) ^ static_cast<uint64_t>(word)) * kFactor;
  };
  int64_t i = 0;
  for (; i + kLanes <= header.num_words; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) add(lanes[lane], words[i + lane]);
  for (; i < header.num_words; ++i) add(lanes[i % kLanes], words[i]);
  uint64_t sum = 0;
  for (const uint64_t lane : lanes) sum = mix64(sum ^ lane);
  return sum;
}

inline void check_pipe_capacity(int64_t capacity) {
  if (capacity < 4 * kFrameWords || capacity % kFrameWords != 0)
    throw std::invalid_argument("pipe: its ring must have at least 16 words, in multiples of 4");
}

class PipeWriter {
 public:
  // ring: or its mirror, of `capacity` words.
  PipeWriter(int64_t* ring, int64_t capacity) : ring_(ring), capacity_(capacity) { check_pipe_capacity(capacity); }

  int64_t head() const { return head_; }
  void set_tail(int64_t tail) { tail_ = tail; }

  // Writes as many of the last n words of a message as there is room for. Returns their number.
  int64_t write(const int64_t* words, int64_t n) {
    int64_t written = 0;
    while (written < n) {
      const int64_t offset = head_ % capacity_, to_end = capacity_ - offset, room = capacity_ - (head_ - tail_);
      const int64_t most = std::min(room, to_end) - kFrameWords;
      if (most < 0 || (most == 0 && room <= to_end)) break;  // no room; only the end of the ring is filled
      const int64_t num = std::min(most, n - written);
      FrameHeader header{++number_, num, n - written - num, 0};
      header.checksum = checksum_of(header, words + written);
      std::memcpy(ring_ + offset + kFrameWords, words + written, num * sizeof(int64_t));
      std::memcpy(ring_ + offset, &header, sizeof(header));
      head_ += frame_words(num);
      written += num;
    }
    return written;
  }

 private:
  int64_t* ring_;
  int64_t capacity_;
  int64_t number_ = 0;  // of the last frame
  int64_t head_ = 0, tail_ = 0;
};

class PipeReader {
 public:
  // ring: or its mirror, of `capacity` words.
  PipeReader(const int64_t* ring, int64_t capacity) : ring_(ring), capacity_(capacity) {
    check_pipe_capacity(capacity);
  }

  // Words taken: the tail that the writer needs to know.
  int64_t tail() const { return tail_; }

  // Takes frames until a message is whole, and returns true, or until there is none.
  bool read() {
    FrameHeader header;
    while (is_whole(&header)) {
      if (is_complete_) message_.clear();
      const int64_t* words = ring_ + tail_ % capacity_ + kFrameWords;
      message_.insert(message_.end(), words, words + header.num_words);
      tail_ += frame_words(header.num_words);
      ++number_;
      is_complete_ = header.num_left == 0;
      if (is_complete_) return true;
    }
    return false;
  }

  // The message. REQUIRES: read() returned true, and was not called since.
  std::vector<int64_t>& message() { return message_; }

  // Words of the next frame with its header, as far as its header is here; 0 if that is not.
  int64_t next_words() const {
    const FrameHeader header = next_header();
    return is_next(header) ? frame_words(header.num_words) : 0;
  }

 private:
  // The writer may be another process, or a network adapter.
  FrameHeader next_header() const {
    FrameHeader header;
    const int64_t* at = ring_ + tail_ % capacity_;
    header.number = __atomic_load_n(at, __ATOMIC_ACQUIRE);
    std::memcpy(reinterpret_cast<int64_t*>(&header) + 1, at + 1, sizeof(header) - sizeof(int64_t));
    return header;
  }

  bool is_next(const FrameHeader& header) const {
    const int64_t most = capacity_ - tail_ % capacity_ - kFrameWords;
    return header.number == number_ && header.num_words >= 0 && header.num_words <= most && header.num_left >= 0;
  }

  bool is_whole(FrameHeader* header) const {
    *header = next_header();
    const int64_t* words = ring_ + tail_ % capacity_ + kFrameWords;
    return is_next(*header) && checksum_of(*header, words) == header->checksum;
  }

  const int64_t* ring_;
  int64_t capacity_;
  int64_t number_ = 1;  // of the next frame
  int64_t tail_ = 0;
  std::vector<int64_t> message_;
  bool is_complete_ = true;
};

}  // namespace hetmpi
