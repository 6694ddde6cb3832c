// Huge pages for memory that processes share, which the kernel does not give by itself. Rows are read at random, and
// with small pages address translation takes a fifth of that time (docs/results.md).
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>

namespace hetmpi {

constexpr size_t kHugePage = size_t{2} << 20;

// The next multiple of a huge page.
inline uintptr_t to_huge_page(uintptr_t address) { return (address + kHugePage - 1) / kHugePage * kHugePage; }

// A second mapping of memory that processes share, in which addresses lie as in the file modulo huge pages: without
// that the kernel cannot map these. Where there is none, as for memory of one process, data() is the memory itself.
class AlignedView {
 public:
  // memory: begins with a page.
  AlignedView(void* memory, size_t bytes) : data_(memory), bytes_(bytes), reserved_bytes_(bytes + 2 * kHugePage) {
    const uintptr_t offset = offset_in_file(reinterpret_cast<uintptr_t>(memory));
    reserved_ = mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved_ == MAP_FAILED) return;
    const uintptr_t place = to_huge_page(reinterpret_cast<uintptr_t>(reserved_)) + offset % kHugePage;
    // With an old size of 0 it maps shared memory once more, and refuses private memory.
    void* const mapped = mremap(memory, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, reinterpret_cast<void*>(place));
    if (mapped != MAP_FAILED)
      data_ = mapped;
    else
      free();
  }
  ~AlignedView() { free(); }
  AlignedView(const AlignedView&) = delete;

  void* data() const { return data_; }

  // Allocates the memory as huge pages, as far as whole ones fit and the kernel can (Linux 6.1 or later). One page of
  // each is touched first, and so becomes zero: the kernel collapses no huge page without any, and would copy those
  // that are there. REQUIRES: the memory holds nothing. Returns whether all are huge now.
  bool populate() const {
    constexpr int kCollapse = 25;  // MADV_COLLAPSE, which older C libraries do not name
    const uintptr_t at = reinterpret_cast<uintptr_t>(data_), begin = to_huge_page(at);
    const uintptr_t end = (at + bytes_) / kHugePage * kHugePage;
    if (begin >= end) return false;
    void* const pages = reinterpret_cast<void*>(begin);
    madvise(pages, end - begin, MADV_HUGEPAGE);  // enough for memory of one process
    for (uintptr_t page = begin; page < end; page += kHugePage) *reinterpret_cast<volatile char*>(page) = 0;
    return madvise(pages, end - begin, kCollapse) == 0;
  }

 private:
  void free() {
    if (reserved_ != MAP_FAILED) munmap(reserved_, reserved_bytes_);
    reserved_ = MAP_FAILED;
  }

  // The place of an address in the file that is mapped there; 0 if there is none.
  static uintptr_t offset_in_file(uintptr_t address) {
    const std::unique_ptr<FILE, int (*)(FILE*)> maps(std::fopen("/proc/self/maps", "r"), &std::fclose);
    unsigned long begin = 0, end = 0, offset = 0;
    while (maps && std::fscanf(maps.get(), "%lx-%lx %*s %lx%*[^\n]", &begin, &end, &offset) == 3)
      if (begin <= address && address < end) return offset + (address - begin);
    return 0;
  }

  void* data_;
  size_t bytes_;
  void* reserved_;
  size_t reserved_bytes_;
};

}  // namespace hetmpi
