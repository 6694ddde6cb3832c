// Ring: a byte ring through which one origin sends records of gradients to one owner.
//
// The ring is in the owner's memory, which its node shares: a RingHeader, then `capacity` bytes. Its origin writes it
// by plain stores, or, for one on another node, the origin's server here.
//
// A record is a RecordHeader, then keys (n) int64, then, if the format has clocks, clocks (n) and counts (n) int32,
// then, if it has steps, the first and last step of these counts (n, 2) int32, then gradients (n, dim) float32, then
// the sums of their squares (m, square_dim) float32 of the m rows whose count is above 1, padded to kRecordAlign. The
// squares of a single gradient are left to the owner. A record never wraps: a message that does not fit before the end
// of the ring is continued in a second record at its start.
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
#include <type_traits>
#include <vector>

namespace hetmpi {

constexpr uint64_t kRecordAlign = 64;

struct alignas(64) RingHeader {
  alignas(64) std::atomic<uint64_t> head;
  alignas(64) std::atomic<uint64_t> tail;
};
static_assert(sizeof(RingHeader) == 128 && std::atomic<uint64_t>::is_always_lock_free);

struct RecordHeader {
  uint64_t bytes;    // of the whole record, padding included
  int64_t step;      // step of the origin that wrote it
  int64_t num_rows;  // 0 for a record that only fills the end of the ring or only marks the end of a step
  int64_t is_last;   // 1: this origin sends no more records in this step
};

// Format of a sent row: one iteration's gradient (width = dim), or sums over several with their clocks (width =
// sum_dim, of which square_dim are of squares).
struct RecordFormat {
  int64_t width;
  bool has_clocks;
  bool has_steps = false;
  int64_t square_dim = 0;

  int64_t dim() const { return width - square_dim; }
  bool has_squares(int32_t count) const { return square_dim > 0 && count > 1; }

  // Bytes of a row with squares, and of one that sums `count` gradients.
  uint64_t row_bytes() const {
    return sizeof(int64_t) + ((has_clocks ? 2 : 0) + (has_steps ? 2 : 0)) * sizeof(int32_t) + width * sizeof(float);
  }
  uint64_t row_bytes(int32_t count) const {
    return row_bytes() - (has_squares(count) ? 0 : square_dim * sizeof(float));
  }
};

// Gradients of which records are written.
struct PushColumns {
  const int64_t* keys;    // (n)
  const int32_t* clocks;  // (n) or null: c_c of the origin
  const int32_t* counts;  // (n) or null: iterations summed
  const int32_t* steps;   // (n, 2) or null: their first and last step
  const float* values;    // (n, width): gradients, then their squares

  // Bytes in a record of the row whose clock, count and values are entry j.
  uint64_t row_bytes(int64_t j, RecordFormat format) const {
    return format.has_clocks ? format.row_bytes(counts[j]) : format.row_bytes();
  }
};

// Columns of a record, as PushColumns but for the values.
template <typename Int64, typename Int32, typename Float>
struct Columns {
  Int64* keys;
  Int32* clocks;
  Int32* counts;
  Int32* steps;
  Float* grads;    // (n, dim)
  Float* squares;  // (m, square_dim)
};

using RecordColumns = Columns<const int64_t, const int32_t, const float>;

// A record in place: pointers into the ring.
struct Record {
  const RecordHeader* header;
  RecordColumns columns;
};

inline uint64_t padded(uint64_t bytes) { return (bytes + kRecordAlign - 1) / kRecordAlign * kRecordAlign; }

// The columns of a record of `n` rows whose header is at `header`.
template <typename Byte>
auto columns_of(Byte* header, int64_t n, RecordFormat format) {
  constexpr bool kConst = std::is_const_v<Byte>;
  using Int64 = std::conditional_t<kConst, const int64_t, int64_t>;
  using Int32 = std::conditional_t<kConst, const int32_t, int32_t>;
  using Float = std::conditional_t<kConst, const float, float>;
  Byte* at = header + sizeof(RecordHeader);
  Columns<Int64, Int32, Float> columns{reinterpret_cast<Int64*>(at), nullptr, nullptr, nullptr, nullptr, nullptr};
  at += n * sizeof(int64_t);
  if (format.has_clocks) {
    columns.clocks = reinterpret_cast<Int32*>(at);
    columns.counts = columns.clocks + n;
    at += n * 2 * sizeof(int32_t);
  }
  if (format.has_steps) {
    columns.steps = reinterpret_cast<Int32*>(at);
    at += n * 2 * sizeof(int32_t);
  }
  columns.grads = reinterpret_cast<Float*>(at);
  columns.squares = columns.grads + n * format.dim();
  return columns;
}

using FilledColumns = Columns<int64_t, int32_t, float>;

// Fills the columns of n rows: the key of row i is from.keys[i], with clock, counts, steps and values at order[i].
inline void write_columns(const FilledColumns& to, const PushColumns& from, const int64_t* order, int64_t n,
                          RecordFormat format) {
  std::copy(from.keys, from.keys + n, to.keys);
  if (format.has_clocks) {
    for (int64_t i = 0; i < n; ++i) to.clocks[i] = from.clocks[order[i]];
    for (int64_t i = 0; i < n; ++i) to.counts[i] = from.counts[order[i]];
  }
  if (format.has_steps)
    for (int64_t i = 0; i < n; ++i) std::copy_n(from.steps + 2 * order[i], 2, to.steps + 2 * i);
  const int64_t width = format.width, dim = format.dim(), square_dim = format.square_dim;
  auto* squares = to.squares;
  for (int64_t i = 0; i < n; ++i) {
    const float* values = from.values + order[i] * width;
    std::memcpy(to.grads + i * dim, values, dim * sizeof(float));
    if (square_dim == 0 || !format.has_squares(from.counts[order[i]])) continue;
    std::memcpy(squares, values + dim, square_dim * sizeof(float));
    squares += square_dim;
  }
}

// The number of the first n rows that have squares.
inline int64_t num_squares(const int32_t* counts, int64_t n, RecordFormat format) {
  if (format.square_dim == 0) return 0;
  return std::count_if(counts, counts + n, [format](int32_t count) { return format.has_squares(count); });
}

// The record at `at`, of which `size` bytes are there. Throws std::out_of_range if its rows need more bytes than it
// has, or than are there: another program, or another version of this one, may have written it.
inline Record record_at(const uint8_t* at, uint64_t size, RecordFormat format) {
  const auto* header = reinterpret_cast<const RecordHeader*>(at);
  const auto require = [&](bool is_whole) {
    if (!is_whole) throw std::out_of_range("a record is shorter than its rows, or its message than the record");
  };
  require(size >= sizeof(RecordHeader));
  const uint64_t bytes = header->bytes, least = format.row_bytes(1);  // of a row without squares
  require(sizeof(RecordHeader) <= bytes && bytes <= size && bytes % alignof(RecordHeader) == 0);
  const uint64_t room = bytes - sizeof(RecordHeader);
  require(header->num_rows >= 0 && static_cast<uint64_t>(header->num_rows) <= room / least);
  const RecordColumns columns = columns_of(at, header->num_rows, format);
  const uint64_t squares = num_squares(columns.counts, header->num_rows, format) * format.square_dim * sizeof(float);
  require(header->num_rows * least + squares <= room);
  return {header, columns};
}

// Copies the first n rows of a record.
inline void copy_columns(const FilledColumns& to, const RecordColumns& from, int64_t n, RecordFormat format) {
  std::copy_n(from.keys, n, to.keys);
  if (format.has_clocks) {
    std::copy_n(from.clocks, n, to.clocks);
    std::copy_n(from.counts, n, to.counts);
  }
  if (format.has_steps) std::copy_n(from.steps, 2 * n, to.steps);
  std::copy_n(from.grads, n * format.dim(), to.grads);
  if (format.square_dim > 0)
    std::copy_n(from.squares, num_squares(from.counts, n, format) * format.square_dim, to.squares);
}

// The columns of a record from row `begin` on.
inline RecordColumns columns_from(const RecordColumns& from, int64_t begin, RecordFormat format) {
  RecordColumns part = from;
  part.keys += begin;
  if (format.has_clocks) part.clocks += begin, part.counts += begin;
  if (format.has_steps) part.steps += 2 * begin;
  part.grads += begin * format.dim();
  if (format.square_dim > 0) part.squares += num_squares(from.counts, begin, format) * format.square_dim;
  return part;
}

// Minimum capacity of a ring through which a message passes one row at a time, at any offset.
inline uint64_t min_ring_capacity(RecordFormat format) { return 2 * padded(sizeof(RecordHeader) + format.row_bytes()); }

inline void check_ring_capacity(uint64_t capacity, RecordFormat format) {
  if (capacity % kRecordAlign != 0 || capacity < min_ring_capacity(format))
    throw std::invalid_argument("ring capacity must be a multiple of " + std::to_string(kRecordAlign) +
                                " and at least " + std::to_string(min_ring_capacity(format)) + " bytes, got " +
                                std::to_string(capacity));
}

// The producer's end.
class RingProducer {
 public:
  RingProducer(uint8_t* memory, uint64_t capacity, RecordFormat format)
      : header_(reinterpret_cast<RingHeader*>(memory)),
        data_(memory + sizeof(RingHeader)),
        capacity_(capacity),
        format_(format) {
    check_ring_capacity(capacity, format);
  }

  uint64_t head() const { return header_->head.load(std::memory_order_relaxed); }
  uint64_t tail() const { return header_->tail.load(std::memory_order_acquire); }
  bool is_drained() const { return tail() == head(); }

  // Writes one record with as many rows of the message as fit before the end of the ring; is_last is set only with the
  // last row. The key of row i is from.keys[i], with clocks, counts and values at order[i]. Returns the number of
  // rows written, or -1 if there was no room. A caller with rows left calls again.
  int64_t write(int64_t step, const PushColumns& from, const int64_t* order, int64_t num_rows, bool is_last) {
    const auto bytes_of = [&](int64_t i) { return from.row_bytes(order[i], format_); };
    return add(step, num_rows, is_last, bytes_of, [&](uint8_t* header, int64_t n) {
      write_columns(columns_of(header, n, format_), from, order, n, format_);
    });
  }

  // As above, for the rows of a record that another rank sent.
  int64_t write(int64_t step, const RecordColumns& from, int64_t num_rows, bool is_last) {
    const auto bytes_of = [&](int64_t i) {
      return format_.has_clocks ? format_.row_bytes(from.counts[i]) : format_.row_bytes();
    };
    return add(step, num_rows, is_last, bytes_of,
               [&](uint8_t* header, int64_t n) { copy_columns(columns_of(header, n, format_), from, n, format_); });
  }

 private:
  // Writes one record with as many of num_rows rows as fit. bytes_of(i): of row i; fill(header, n): writes n columns.
  template <typename BytesOf, typename Fill>
  int64_t add(int64_t step, int64_t num_rows, bool is_last, BytesOf bytes_of, Fill fill) {
    const uint64_t head = this->head(), offset = head % capacity_;
    const uint64_t room = std::min(capacity_ - (head - tail()), capacity_ - offset);
    if (room < kRecordAlign) return -1;
    uint64_t bytes = sizeof(RecordHeader);
    int64_t n = 0;
    for (; n < num_rows; ++n) {
      const uint64_t more = bytes_of(n);
      if (bytes + more > room) break;
      bytes += more;
    }
    const bool fills_end = n == 0 && num_rows > 0;
    if (fills_end && room < capacity_ - offset) return -1;  // no room; only the end of the ring is filled
    bytes = fills_end ? room : padded(bytes);
    *reinterpret_cast<RecordHeader*>(data_ + offset) = {bytes, step, n, is_last && n == num_rows};
    fill(data_ + offset, n);
    header_->head.store(head + bytes, std::memory_order_release);
    return n;
  }

  RingHeader* header_;
  uint8_t* data_;
  uint64_t capacity_;
  RecordFormat format_;
};

// Writes the rows from *num_written to num_rows, as one or several records, and advances *num_written. write(n): writes
// up to n of them, as RingProducer::write. Returns false if the ring is full.
template <typename Write>
bool write_rest(int64_t num_rows, int64_t* num_written, Write write) {
  int64_t n = 0;
  do {
    n = write(num_rows - *num_written);
    *num_written += std::max<int64_t>(n, 0);
  } while (n >= 0 && *num_written < num_rows);
  return n >= 0;
}

// The consumer's end.
class RingConsumer {
 public:
  RingConsumer(uint8_t* memory, uint64_t capacity, RecordFormat format)
      : header_(reinterpret_cast<RingHeader*>(memory)),
        data_(memory + sizeof(RingHeader)),
        capacity_(capacity),
        format_(format) {
    check_ring_capacity(capacity, format);
  }

  // Reads the oldest record; false if there is none. It is valid until release(). Throws as record_at().
  bool peek(Record* record) const {
    const uint64_t tail = header_->tail.load(std::memory_order_relaxed), offset = tail % capacity_;
    const uint64_t num_written = header_->head.load(std::memory_order_acquire) - tail;
    if (num_written == 0) return false;
    *record = record_at(data_ + offset, std::min(num_written, capacity_ - offset), format_);
    return true;
  }

  // Returns the oldest record's bytes to the producer, after all of it has been applied.
  void release(const Record& record) {
    const uint64_t tail = header_->tail.load(std::memory_order_relaxed);
    header_->tail.store(tail + record.header->bytes, std::memory_order_release);
  }

 private:
  RingHeader* header_;
  uint8_t* data_;
  uint64_t capacity_;
  RecordFormat format_;
};

// The consumer's ends of all rings in an owner's memory: one per origin, `stride` bytes apart, in rank order.
inline std::vector<RingConsumer> consumers(uint8_t* rings, uint64_t stride, int64_t num_origins, RecordFormat format) {
  std::vector<RingConsumer> ends;
  for (int64_t origin = 0; origin < num_origins; ++origin)
    ends.emplace_back(rings + origin * stride, stride - sizeof(RingHeader), format);
  return ends;
}

}  // namespace hetmpi
