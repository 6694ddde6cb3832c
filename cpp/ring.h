// Ring: a byte ring through which one origin sends gradient records to one owner.
//
// The ring lies in the owner's RMA memory: a RingHeader, then `capacity` bytes. An origin on the owner's node writes it
// by plain stores; an origin elsewhere writes a mirror of the data in its own memory and copies what it wrote by MPI_Put,
// then the head. Either way the bytes and the rules are the same.
//
// A record is a RecordHeader, then rows (n) int64, then grads (n, dim) float32, padded to kRecordAlign. It never wraps:
// a message that does not fit before the end of the ring continues in a second record at its start.
//
// Invariants:
//   head counts the bytes ever written, tail the bytes ever consumed; tail <= head <= tail + capacity;
//   one producer writes data and head, one consumer writes tail;
//   bytes in [tail, head) are whole records; offsets are head and tail modulo capacity, multiples of kRecordAlign.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace hetmpi {

constexpr uint64_t kRecordAlign = 64;

struct alignas(64) RingHeader {
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint64_t> tail;
};
static_assert(sizeof(RingHeader) == 128 && std::atomic<uint64_t>::is_always_lock_free);

struct RecordHeader {
  uint64_t bytes;   // of the whole record, padding included
  int64_t step;     // step of the origin that wrote it
  int64_t num_rows; // 0 for a record that only fills the end of the ring or only says "last"
  int64_t is_last;  // 1: this origin sends no more for this step
};

// A record in place: pointers into the ring.
struct Record {
  const RecordHeader* header;
  const int64_t* rows;  // (num_rows)
  const float* grads;   // (num_rows, dim)
};

inline uint64_t padded(uint64_t bytes) { return (bytes + kRecordAlign - 1) / kRecordAlign * kRecordAlign; }

inline uint64_t record_bytes(int64_t num_rows, int64_t dim) {
  return padded(sizeof(RecordHeader) + static_cast<uint64_t>(num_rows) * (sizeof(int64_t) + dim * sizeof(float)));
}

// The smallest ring through which a message can pass one row at a time, whatever the offset it meets.
inline uint64_t min_ring_capacity(int64_t dim) { return 2 * record_bytes(1, dim); }

inline void check_ring_capacity(uint64_t capacity, int64_t dim) {
  if (capacity % kRecordAlign != 0 || capacity < min_ring_capacity(dim))
    throw std::invalid_argument("ring capacity must be a multiple of " + std::to_string(kRecordAlign) + " and at least " +
                                std::to_string(min_ring_capacity(dim)) + " bytes, got " + std::to_string(capacity));
}

// The origin's end. `data` is the ring itself or its mirror.
class RingProducer {
 public:
  RingProducer(uint8_t* data, uint64_t capacity, int64_t dim) : data_(data), capacity_(capacity), dim_(dim) {
    check_ring_capacity(capacity, dim);
  }

  uint64_t head() const { return head_; }
  void set_tail(uint64_t tail) { tail_ = tail; }

  // Writes one record with as many of the `num_rows` rows as fit now before the end of the ring; "last" is said only
  // with the last row. Row i of the message is (rows[i], grads[order[i]]). Returns the rows written, or -1
  // if nothing could be written (no room: take the consumer's tail again). A caller with rows left calls again.
  int64_t write(int64_t step, const int64_t* rows, const float* grads, const int64_t* order, int64_t num_rows,
                bool is_last) {
    const uint64_t offset = head_ % capacity_;
    const uint64_t room = std::min(capacity_ - (head_ - tail_), capacity_ - offset);
    const int64_t fits = rows_in(room);
    if (fits < 0) return -1;
    if (fits == 0 && num_rows > 0 && room < capacity_ - offset) return -1;  // wait; only the end of the ring is filled up
    const int64_t n = std::min(fits, num_rows);
    const bool fills_end = n == 0 && num_rows > 0;
    RecordHeader* header = reinterpret_cast<RecordHeader*>(data_ + offset);
    *header = {fills_end ? room : record_bytes(n, dim_), step, n, is_last && n == num_rows};
    int64_t* out_rows = reinterpret_cast<int64_t*>(header + 1);
    float* out_grads = reinterpret_cast<float*>(out_rows + n);
    std::copy(rows, rows + n, out_rows);
    for (int64_t i = 0; i < n; ++i) std::memcpy(out_grads + i * dim_, grads + order[i] * dim_, dim_ * sizeof(float));
    head_ += header->bytes;
    return n;
  }

 private:
  // Rows that a record of at most `room` bytes can hold; -1 if not even its header.
  int64_t rows_in(uint64_t room) const {
    if (room < kRecordAlign) return -1;
    return static_cast<int64_t>((room - sizeof(RecordHeader)) / (sizeof(int64_t) + dim_ * sizeof(float)));
  }

  uint8_t* data_;
  uint64_t capacity_;
  int64_t dim_;
  uint64_t head_ = 0;
  uint64_t tail_ = 0;
};

// The owner's end.
class RingConsumer {
 public:
  RingConsumer(uint8_t* memory, uint64_t capacity, int64_t dim)
      : header_(reinterpret_cast<RingHeader*>(memory)), data_(memory + sizeof(RingHeader)), capacity_(capacity) {
    check_ring_capacity(capacity, dim);
  }

  // Looks at the oldest record; false if there is none. It stays valid until release().
  bool peek(Record* record) const {
    const uint64_t tail = header_->tail.load(std::memory_order_relaxed);
    if (header_->head.load(std::memory_order_acquire) == tail) return false;
    const auto* header = reinterpret_cast<const RecordHeader*>(data_ + tail % capacity_);
    const auto* rows = reinterpret_cast<const int64_t*>(header + 1);
    *record = {header, rows, reinterpret_cast<const float*>(rows + header->num_rows)};
    return true;
  }

  // Gives the oldest record's bytes back to the producer.
  void release(const Record& record) {
    const uint64_t tail = header_->tail.load(std::memory_order_relaxed);
    header_->tail.store(tail + record.header->bytes, std::memory_order_release);
  }

 private:
  RingHeader* header_;
  uint8_t* data_;
  uint64_t capacity_;
};

}  // namespace hetmpi
