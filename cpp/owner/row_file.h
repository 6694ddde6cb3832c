// RowFile: the rows of a shard in a file, of which a budget of pages stays in memory; and PageKeeper, the threads that
// read and drop pages.
//
// Row i is its weight (dim), then its state (state_dim), from byte i * row_bytes on. The file is sparse: a row takes
// disk from its first update on. Before that it is absent, its weight follows from its key (row_init.h), and its state
// is 0.
//
// Every process of the node maps the files of all its ranks; the owner's alone writes. What they know of rows and pages
// lies in memory that they share (Marks).
//
// Invariants:
//   the owner writes a row before it marks it as present: who sees the mark sees a whole row;
//   a page has disk before it is written by memory: a full disk is an error of the owner, never a SIGBUS;
//   a page may leave memory at any time, as the kernel brings it back: marks of pages decide speed alone;
//   once a page could not be written to the disk (kDiskError), no row is written any more;
//   while the rows are frozen, a row is saved as it was before it is written for the first time.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "owner/huge_pages.h"
#include "owner/partition.h"
#include "owner/row_init.h"

namespace hetmpi {

// Of one file, counted by all processes of the node.
enum FileCount { kResidentPages, kPagesRead, kPagesWritten, kPagesAllocated, kBallastUsed, kDiskError, kNumFileCounts };

// The number of times that this thread has waited for a disk.
inline int64_t disk_waits() {
  rusage used;
  return getrusage(RUSAGE_THREAD, &used) == 0 ? used.ru_majflt : 0;
}

class PageKeeper;

class RowFile {
 public:
  struct Marks {
    uint8_t* rows;    // (num_rows) 1: present
    uint8_t* pages;   // (num_pages) bits of PageMark
    int64_t* counts;  // (kNumFileCounts)
  };
  enum PageMark : uint8_t { kAllocated = 1, kResident = 2, kUsed = 4, kDirty = 8 };
  struct Form {
    int64_t num_rows, dim, state_dim;
  };
  struct Init {
    Partition partition;
    int64_t owner;
    uint64_t seed;
    float std;
  };

  // file: of bytes(form), its descriptor is closed by the destructor, as are those of `before`, for frozen rows, and
  // `ballast`, disk that is freed when there is no more; -1 for both where another rank is the owner.
  RowFile(int file, int before, int ballast, Form form, Marks marks, Init init, int64_t budget_pages)
      : file_(file),
        before_(before),
        ballast_(ballast),
        form_(form),
        marks_(marks),
        init_(std::move(init)),
        budget_pages_(budget_pages),
        row_floats_(form.dim + form.state_dim),
        num_pages_(bytes(form) / kPage) {
    const int access = is_owner() ? PROT_READ | PROT_WRITE : PROT_READ;
    void* const mapped = mmap(nullptr, bytes(form), access, MAP_SHARED, file_, 0);
    if (mapped == MAP_FAILED) fail("mmap");
    data_ = static_cast<char*>(mapped);
    madvise(data_, bytes(form), MADV_RANDOM);
    if (!is_owner()) ::close(std::exchange(file_, -1));  // the mapping is enough
  }
  ~RowFile() { close(); }
  RowFile(const RowFile&) = delete;

  // Of the file: whole pages, at least one.
  static int64_t bytes(const Form& form) {
    const int64_t size = sizeof(float) * (form.dim + form.state_dim) * form.num_rows;
    return std::max<int64_t>(1, (size + kPage - 1) / kPage) * kPage;
  }

  // Gives back memory and disk; a copy of frozen rows under way fails. Rows must not be used any more.
  void close() {
    const std::lock_guard<std::mutex> copying(copy_lock_);
    const std::lock_guard<std::mutex> hold(frozen_lock_);
    is_frozen_ = false;
    if (data_ != nullptr) munmap(std::exchange(data_, nullptr), bytes(form_));
    for (int* descriptor : {&file_, &before_, &ballast_})
      if (*descriptor >= 0) ::close(std::exchange(*descriptor, -1));
  }

  bool is_closed() const { return data_ == nullptr; }
  bool is_owner() const { return is_owner_; }
  const Form& form() const { return form_; }
  int64_t num_pages() const { return num_pages_; }
  int64_t count(FileCount which) const { return __atomic_load_n(marks_.counts + which, __ATOMIC_RELAXED); }

  // The weight (dim) of a row: in the file, or in scratch (dim).
  const float* read(int64_t row, float* scratch) const {
    if (!is_present(row)) {
      first_value(row, scratch);
      return scratch;
    }
    touch(row, 0);
    return at(row);
  }

  // The weight (dim) of a row that the owner writes, and its state behind it. Throws std::system_error without disk.
  float* to_write(int64_t row) {
    if (const auto problem = static_cast<int>(count(kDiskError))) disk_error(problem);
    if (is_frozen_.load(std::memory_order_relaxed)) save(row);
    float* const to = at(row);
    if (is_present(row)) {
      touch(row, kDirty);
      return to;
    }
    for (int64_t page = first_page(row); page <= last_page(row); ++page) allocate(page);
    touch(row, kDirty);
    first_value(row, to);
    std::fill_n(to + form_.dim, form_.state_dim, 0.0f);
    __atomic_store_n(marks_.rows + row, 1, __ATOMIC_RELEASE);
    return to;
  }

  // Whether these numbers are the weight, or the state, of an absent row.
  bool has_first_value(int64_t row, bool is_state, const float* numbers) const {
    if (is_present(row)) return false;
    std::vector<float> first(is_state ? form_.state_dim : form_.dim, 0.0f);
    if (!is_state) first_value(row, first.data());
    return std::memcmp(first.data(), numbers, sizeof(float) * first.size()) == 0;
  }

  // Copies weight or state of rows (n) to out (n, width), of absent ones too. From any thread of any process.
  void copy(const int64_t* rows, int64_t n, bool is_state, float* out) const {
    const int64_t width = is_state ? form_.state_dim : form_.dim;
    for (int64_t i = 0; i < n; ++i) copy_row(rows[i], is_present(rows[i]), at(rows[i]), is_state, out + i * width);
  }

  // From here on copy_frozen() copies rows as they are now, whatever is written. REQUIRES: no writer now; the owner.
  void freeze() {
    const std::lock_guard<std::mutex> hold(frozen_lock_);
    saved_.assign(form_.num_rows, 0);
    problem_ = 0;
    is_frozen_ = true;
  }
  void thaw() {
    const std::lock_guard<std::mutex> hold(frozen_lock_);
    is_frozen_ = false;
    saved_ = {};
    if (ftruncate(before_, 0) != 0) problem_ = errno;
  }
  void copy_frozen(const int64_t* rows, int64_t n, bool is_state, float* out) const {
    const std::lock_guard<std::mutex> copying(copy_lock_);
    if (!is_frozen_) throw std::runtime_error("rows of a checkpoint: the table is closed");
    const int64_t width = is_state ? form_.state_dim : form_.dim;
    std::vector<float> row(row_floats_);
    for (int64_t begin = 0; begin < n; begin += kFrozenRows) {
      const int64_t end = std::min(n, begin + kFrozenRows);
      read_pages(rows + begin, end - begin);
      const std::lock_guard<std::mutex> hold(frozen_lock_);  // a row that is saved meanwhile is not written yet
      if (problem_ != 0) throw std::system_error(problem_, std::generic_category(), "rows of a checkpoint");
      for (int64_t i = begin; i < end; ++i) {
        const uint8_t saved = saved_[rows[i]];
        const bool is_saved = saved != 0, is_there = is_saved ? saved == kWasPresent : is_present(rows[i]);
        if (is_saved && is_there) read_before(rows[i], row.data());
        copy_row(rows[i], is_there, is_saved ? row.data() : at(rows[i]), is_state, out + i * width);
      }
    }
  }

  // Rows (n) will be used soon: their pages are read beside the caller. Thread-safe.
  void want(const int64_t* rows, int64_t n) const;

  // Reads pages for want(), and drops those in excess. Null: nothing does.
  void set_keeper(PageKeeper* keeper) { keeper_ = keeper; }

  // Appends the pages of rows (n) that must be read, and marks them as in memory.
  void add_wanted(const int64_t* rows, int64_t n, std::vector<int64_t>* pages) const {
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t page = first_page(rows[i]); page <= last_page(rows[i]); ++page) {
        const uint8_t marks = __atomic_load_n(marks_.pages + page, __ATOMIC_RELAXED);
        if ((marks & kAllocated) && !(marks & kResident)) {
          mark(page, kResident | kUsed);
          pages->push_back(page);
        }
      }
    }
  }

  // Whether so many more pages are in memory than the budget allows that users of rows should wait.
  bool is_over_budget() const { return count(kResidentPages) > budget_pages_ + budget_pages_ / 16 + kSlack; }

  // Reads pages, all at once.
  void fetch(const std::vector<int64_t>& pages) const {
    constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, which older C libraries do not name
    for (const int64_t page : pages) madvise(data_ + page * kPage, kPage, MADV_WILLNEED);
    for (const int64_t page : pages) madvise(data_ + page * kPage, kPage, kPopulateRead);
  }

  // Drops pages until the budget is met: those not used since the hand passed them last. REQUIRES: the owner, one
  // thread. Returns whether there was one to drop.
  bool drop_excess() {
    const int64_t excess = count(kResidentPages) - budget_pages_;
    if (excess <= 0) return false;
    std::vector<Range> ranges;
    int64_t found = 0;
    for (int64_t looks = 2 * num_pages_; looks > 0 && found < std::min(excess, kMostDropped); --looks) {
      if (hand_ % kSpan == 0) find_unmarked(hand_);
      const int64_t page = hand_;
      hand_ = (hand_ + 1) % num_pages_;
      const uint8_t marks = __atomic_load_n(marks_.pages + page, __ATOMIC_RELAXED);
      if (!(marks & kResident)) continue;
      if (marks & kUsed) {
        __atomic_fetch_and(marks_.pages + page, static_cast<uint8_t>(~kUsed), __ATOMIC_RELAXED);
        continue;
      }
      const uint8_t before =
          __atomic_fetch_and(marks_.pages + page, static_cast<uint8_t>(~(kResident | kDirty)), __ATOMIC_RELAXED);
      if (before & kDirty) add(kPagesWritten, 1);
      ++found;
      if (!ranges.empty() && ranges.back().end == page)
        ++ranges.back().end;
      else
        ranges.push_back({page, page + 1});
    }
    add(kResidentPages, -found);
    drop(ranges);
    return found > 0;
  }

  // Lets the owner drop pages that this process has read.
  void unmap_pages() const { madvise(data_, bytes(form_), MADV_DONTNEED); }

 private:
  static constexpr int64_t kFrozenRows = 512, kMostDropped = 512, kSpan = 2048, kSlack = 256;  // pages
  static constexpr uint8_t kWasAbsent = 1, kWasPresent = 2;

  struct Range {
    int64_t begin, end;
  };

  [[noreturn]] static void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

  float* at(int64_t row) const { return reinterpret_cast<float*>(data_) + row * row_floats_; }
  int64_t row_bytes() const { return static_cast<int64_t>(sizeof(float)) * row_floats_; }
  int64_t first_page(int64_t row) const { return row * row_bytes() / static_cast<int64_t>(kPage); }
  int64_t last_page(int64_t row) const { return ((row + 1) * row_bytes() - 1) / static_cast<int64_t>(kPage); }
  bool is_present(int64_t row) const { return __atomic_load_n(marks_.rows + row, __ATOMIC_ACQUIRE) != 0; }
  void add(FileCount which, int64_t num) const { __atomic_fetch_add(marks_.counts + which, num, __ATOMIC_RELAXED); }

  void first_value(int64_t row, float* to) const {
    init_row(to, form_.dim, init_.partition.key_of(init_.owner, row), init_.seed, init_.std);
  }

  // from: the row, if it is there.
  void copy_row(int64_t row, bool is_there, const float* from, bool is_state, float* out) const {
    if (is_there)
      std::memcpy(out, from + (is_state ? form_.dim : 0), sizeof(float) * (is_state ? form_.state_dim : form_.dim));
    else if (is_state)
      std::fill_n(out, form_.state_dim, 0.0f);
    else
      first_value(row, out);
  }

  void touch(int64_t row, uint8_t more) const {
    for (int64_t page = first_page(row); page <= last_page(row); ++page) {
      const uint8_t wanted = kResident | kUsed | more;
      if ((__atomic_load_n(marks_.pages + page, __ATOMIC_RELAXED) & wanted) != wanted) mark(page, wanted);
    }
  }

  void mark(int64_t page, uint8_t marks) const {
    const uint8_t before = __atomic_fetch_or(marks_.pages + page, marks, __ATOMIC_RELAXED);
    if (before & kResident) return;
    add(kResidentPages, 1);
    if (before & kAllocated) add(kPagesRead, 1);
  }

  // Gives a page disk, that of the ballast if there is no other. The rank's main thread and its applier may both write.
  void allocate(int64_t page) {
    if (__atomic_load_n(marks_.pages + page, __ATOMIC_ACQUIRE) & kAllocated) return;
    const std::lock_guard<std::mutex> hold(allocate_lock_);
    if (__atomic_load_n(marks_.pages + page, __ATOMIC_RELAXED) & kAllocated) return;
    int problem = take_disk(page);
    if (is_full(problem) && drops_ballast()) problem = take_disk(page);
    if (problem != 0) disk_error(problem);
    add(kPagesAllocated, 1);
    mark(page, kResident | kUsed);  // before it is allocated: nothing is read
    __atomic_fetch_or(marks_.pages + page, kAllocated, __ATOMIC_RELEASE);
  }

  static bool is_full(int problem) { return problem == ENOSPC || problem == EDQUOT; }
  [[noreturn]] static void disk_error(int problem) {
    throw std::system_error(problem, std::generic_category(), "rows in table.store_dir");
  }

  // Frees the ballast; false if it was free before.
  bool drops_ballast() {
    if (__atomic_fetch_add(marks_.counts + kBallastUsed, 1, __ATOMIC_RELAXED) > 0) return false;
    return ftruncate(ballast_, 0) == 0;
  }

  // By writing it: cheaper than fallocate(), after which the first access would look for it on the disk.
  int take_disk(int64_t page) const {
    static constexpr char kZeros[kPage] = {};
    const ssize_t written = pwrite(file_, kZeros, kPage, page * kPage);
    return written == static_cast<ssize_t>(kPage) ? 0 : written < 0 ? errno : ENOSPC;
  }

  // Saves a frozen row that will be written.
  void save(int64_t row) {
    const std::lock_guard<std::mutex> hold(frozen_lock_);
    if (!is_frozen_ || saved_[row] != 0) return;
    const bool is_there = is_present(row);
    int problem = is_there ? write_before(row) : 0;
    if (is_full(problem) && drops_ballast()) problem = write_before(row);
    if (problem != 0) {
      problem_ = problem;
      drops_ballast();  // the run ends soon, with another checkpoint
    }
    saved_[row] = is_there ? kWasPresent : kWasAbsent;
  }

  // REQUIRES: frozen_lock_ held. Returns 0, or errno.
  int write_before(int64_t row) const {
    const ssize_t written = pwrite(before_, at(row), row_bytes(), row * row_bytes());
    return written == row_bytes() ? 0 : written < 0 ? errno : ENOSPC;
  }

  // REQUIRES: frozen_lock_ held.
  void read_before(int64_t row, float* to) const {
    if (pread(before_, to, row_bytes(), row * row_bytes()) != row_bytes()) fail("rows of a checkpoint");
  }

  // Reads the pages of rows (n), ascending, which are copied next: writers need not wait for the disk.
  void read_pages(const int64_t* rows, int64_t n) const {
    std::vector<int64_t> pages;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t page = first_page(rows[i]); page <= last_page(rows[i]); ++page) {
        const bool is_there = __atomic_load_n(marks_.pages + page, __ATOMIC_RELAXED) & kAllocated;
        if (is_there && (pages.empty() || pages.back() != page)) pages.push_back(page);
      }
    }
    fetch(pages);
  }

  // Marks pages of a span that are in memory without a mark, as after a copy of all rows, or a read beside drop().
  void find_unmarked(int64_t begin) const {
    uint8_t is_there[kSpan];
    const int64_t num = std::min(kSpan, num_pages_ - begin);
    if (mincore(data_ + begin * kPage, num * kPage, is_there) != 0) return;
    for (int64_t i = 0; i < num; ++i) {
      if (!(is_there[i] & 1) || (__atomic_load_n(marks_.pages + begin + i, __ATOMIC_RELAXED) & kResident)) continue;
      const uint8_t before =
          __atomic_fetch_or(marks_.pages + begin + i, static_cast<uint8_t>(kResident), __ATOMIC_RELAXED);
      if (!(before & kResident)) add(kResidentPages, 1);
    }
  }

  // All pages begin to be written before the first is awaited.
  void drop(const std::vector<Range>& ranges) const {
    for (const auto& [begin, end] : ranges) madvise(data_ + begin * kPage, (end - begin) * kPage, MADV_DONTNEED);
    for (const auto& [begin, end] : ranges)
      sync_file_range(file_, begin * kPage, (end - begin) * kPage, SYNC_FILE_RANGE_WRITE);
    for (const auto& [begin, end] : ranges) {
      constexpr unsigned kWait = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
      if (sync_file_range(file_, begin * kPage, (end - begin) * kPage, kWait) != 0)
        __atomic_store_n(marks_.counts + kDiskError, int64_t{errno}, __ATOMIC_RELAXED);
      posix_fadvise(file_, begin * kPage, (end - begin) * kPage, POSIX_FADV_DONTNEED);
    }
  }

  int file_, before_, ballast_;
  bool is_owner_ = before_ >= 0;
  Form form_;
  Marks marks_;
  Init init_;
  int64_t budget_pages_, row_floats_, num_pages_;
  char* data_ = nullptr;
  PageKeeper* keeper_ = nullptr;
  int64_t hand_ = 0;  // the next page that drop_excess() looks at
  std::atomic<bool> is_frozen_{false};
  std::mutex allocate_lock_;
  mutable std::mutex copy_lock_;    // held while frozen rows are copied, taken before the next
  mutable std::mutex frozen_lock_;  // of what follows
  std::vector<uint8_t> saved_;      // (num_rows) kWasAbsent or kWasPresent once a frozen row is saved
  int problem_ = 0;                 // errno of a row that could not be saved
};

// Two threads of a rank: one reads the pages of rows that will be used, the other keeps the rank's file within its
// budget, and lets go of pages of other files, which their owners drop.
class PageKeeper {
 public:
  // files: of all ranks of the node. They must outlive stop().
  explicit PageKeeper(std::vector<RowFile*> files) : files_(std::move(files)) {
    for (RowFile* file : files_) file->set_keeper(this);
    threads_.emplace_back([this] { fetch(); });
    threads_.emplace_back([this] { drop(); });
  }
  ~PageKeeper() {
    for (RowFile* file : files_) file->set_keeper(nullptr);
    stop();
  }

  // Rows (n) of a file will be used soon. Waits while its owner is behind with dropping pages. Thread-safe.
  void want(const RowFile* file, const int64_t* rows, int64_t n) {
    static thread_local std::vector<int64_t> pages;
    pages.clear();
    for (int naps = 0; file->is_over_budget() && naps < kMostNaps; ++naps) std::this_thread::sleep_for(kNap);
    file->add_wanted(rows, n, &pages);
    if (pages.empty()) return;
    {
      const std::lock_guard<std::mutex> hold(lock_);
      wanted_.emplace_back(file, pages);
    }
    wake_.notify_all();
  }

  // May be called twice.
  void stop() {
    {
      const std::lock_guard<std::mutex> hold(lock_);
      stops_ = true;
    }
    wake_.notify_all();
    pause_.notify_all();
    for (std::thread& thread : threads_)
      if (thread.joinable()) thread.join();
  }

 private:
  static constexpr std::chrono::milliseconds kPause{5};
  static constexpr std::chrono::microseconds kNap{200};
  static constexpr int kMostNaps = 250;   // 50 ms
  static constexpr int kMostPasses = 64;  // before a pause: some file systems do not drop pages
  static constexpr int kUnmapEvery = 10;  // pauses

  void fetch() {
    std::vector<std::pair<const RowFile*, std::vector<int64_t>>> wanted;
    while (true) {
      {
        std::unique_lock<std::mutex> hold(lock_);
        wake_.wait(hold, [this] { return stops_ || !wanted_.empty(); });
        if (stops_) return;
        wanted.swap(wanted_);
      }
      for (const auto& [file, pages] : wanted) file->fetch(pages);
      wanted.clear();
    }
  }

  void drop() {
    for (int turn = 0; !waits_for_stop(); ++turn) {
      for (RowFile* file : files_) {
        if (!file->is_owner()) {
          if (turn % kUnmapEvery == 0) file->unmap_pages();
          continue;
        }
        for (int pass = 0; pass < kMostPasses && file->drop_excess() && !has_stopped(); ++pass) {
        }
      }
    }
  }

  bool waits_for_stop() {
    std::unique_lock<std::mutex> hold(lock_);
    return pause_.wait_for(hold, kPause, [this] { return stops_; });
  }
  bool has_stopped() {
    const std::lock_guard<std::mutex> hold(lock_);
    return stops_;
  }

  std::vector<RowFile*> files_;
  std::mutex lock_;  // of the two below
  std::vector<std::pair<const RowFile*, std::vector<int64_t>>> wanted_;
  bool stops_ = false;
  std::condition_variable wake_, pause_;
  std::vector<std::thread> threads_;
};

inline void RowFile::want(const int64_t* rows, int64_t n) const {
  if (keeper_ != nullptr) keeper_->want(this, rows, n);
}

}  // namespace hetmpi
