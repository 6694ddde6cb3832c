// Tests of rows in a file (cpp/owner/row_file.h) in a separate program, to be built with sanitizers
// (tests/cpp/test_core.py): rows and frozen rows compared with a model, while pages are read and dropped beside them.
// Exit code 0 if all hold, otherwise 1 with the failure on stderr.
//
//   row_file_test [SEED]
#include "owner/row_file.h"

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace hetmpi {
namespace {

using Random = std::mt19937_64;
using Rows = std::vector<std::vector<float>>;  // (num_rows) of weight and state

constexpr RowFile::Form kForm{3000, 5, 6};  // rows of 44 bytes: some lie on two pages
constexpr int64_t kBudget = 4;              // pages, of 33

#define CHECK(claim) ((claim) ? void() : (std::fprintf(stderr, "%d: not so: %s\n", __LINE__, #claim), _exit(1)))

int open_file(int64_t num_bytes) {
  char name[] = "/tmp/hetmpi-row-file-XXXXXX";
  const int file = mkstemp(name);
  CHECK(file >= 0 && unlink(name) == 0 && ftruncate(file, num_bytes) == 0);
  return file;
}

// A file with its owner, and the same file as another process of the node sees it.
struct Node {
  Node()
      : file(open_file(RowFile::bytes(kForm))),
        other_file(dup(file)),
        rows(kForm.num_rows),
        pages(RowFile::bytes(kForm) / kPage),
        counts(kNumFileCounts),
        owner(file, open_file(0), open_file(0), kForm, marks(), init(), kBudget),
        reader(other_file, -1, -1, kForm, marks(), init(), kBudget),
        keeper({&owner}),
        other_keeper({&reader}) {}

  RowFile::Marks marks() { return {rows.data(), pages.data(), counts.data()}; }
  static RowFile::Init init() { return {Partition("round_robin", kForm.num_rows, 1), 0, 7, 0.5f}; }

  int file, other_file;
  std::vector<uint8_t> rows, pages;
  std::vector<int64_t> counts;
  RowFile owner, reader;
  PageKeeper keeper, other_keeper;
};

Rows first_values() {
  Rows found(kForm.num_rows, std::vector<float>(kForm.dim + kForm.state_dim, 0.0f));
  for (int64_t row = 0; row < kForm.num_rows; ++row) init_row(found[row].data(), kForm.dim, row, 7, 0.5f);
  return found;
}

// Adds 1 to all numbers of random rows, in the file and in the model.
void update(RowFile& file, Random& random, Rows* model, int64_t num) {
  std::vector<int64_t> rows(num);
  for (int64_t& row : rows) row = static_cast<int64_t>(random() % kForm.num_rows);
  file.want(rows.data(), num);
  for (const int64_t row : rows) {
    float* const numbers = file.to_write(row);
    for (int64_t d = 0; d < kForm.dim + kForm.state_dim; ++d) numbers[d] += 1, (*model)[row][d] += 1;
  }
}

void check_rows(const Rows& model, bool is_state, const std::vector<float>& found) {
  const int64_t width = is_state ? kForm.state_dim : kForm.dim, first = is_state ? kForm.dim : 0;
  for (int64_t row = 0; row < kForm.num_rows; ++row)
    for (int64_t d = 0; d < width; ++d) CHECK(found[row * width + d] == model[row][first + d]);
}

// copy: RowFile::copy or copy_frozen of one file.
template <typename Copy>
void check_all(const Rows& model, Copy copy) {
  std::vector<int64_t> all(kForm.num_rows);
  std::iota(all.begin(), all.end(), 0);
  for (const bool is_state : {false, true}) {
    std::vector<float> found(kForm.num_rows * (is_state ? kForm.state_dim : kForm.dim));
    copy(all.data(), kForm.num_rows, is_state, found.data());
    check_rows(model, is_state, found);
  }
}

void rows_are_those_of_the_model(uint64_t seed) {
  Node node;
  Random random(seed);
  Rows model = first_values();
  std::vector<int64_t> first(50);
  std::iota(first.begin(), first.end(), 0);
  for (int turn = 0; turn < 30; ++turn) {
    update(node.owner, random, &model, turn % 3 == 0 ? 5 : 400);
    check_all(model, [&](auto... of) { (turn % 2 ? node.owner : node.reader).copy(of...); });
    std::vector<float> scratch(kForm.dim);
    node.reader.want(first.data(), 50);
    for (int64_t row = 0; row < 50; ++row) CHECK(node.reader.read(row, scratch.data())[0] == model[row][0]);
  }
  CHECK(node.owner.count(kPagesWritten) > 0);
}

void frozen_rows_stay_as_they_were(uint64_t seed) {
  Node node;
  Random random(seed);
  Rows model = first_values();
  for (int turn = 0; turn < 10; ++turn) {
    update(node.owner, random, &model, 200);
    const Rows frozen = model;
    node.owner.freeze();
    std::thread copier([&] { check_all(frozen, [&](auto... of) { node.owner.copy_frozen(of...); }); });
    for (int part = 0; part < 20; ++part) update(node.owner, random, &model, 100);
    copier.join();
    node.owner.thaw();
  }
}

void a_full_disk_takes_the_ballast_then_is_an_error(uint64_t) {
  const int full = open("/dev/full", O_RDWR);  // every write fails for want of space
  if (full < 0) return;
  std::vector<uint8_t> rows(kForm.num_rows), pages(RowFile::bytes(kForm) / kPage);
  std::vector<int64_t> counts(kNumFileCounts);
  // The file is mapped from a real one, and written to the full device.
  const int file = open_file(RowFile::bytes(kForm));
  RowFile owner(file, open_file(0), open_file(1 << 20), kForm, {rows.data(), pages.data(), counts.data()}, Node::init(),
                kBudget);
  CHECK(dup2(full, file) == file && close(full) == 0);
  bool has_failed = false;
  try {
    owner.to_write(1);
  } catch (const std::system_error& problem) {
    has_failed = problem.code().value() == ENOSPC;
  }
  CHECK(has_failed && owner.count(kBallastUsed) == 1 && rows[1] == 0);
}

void a_row_that_could_not_be_saved_fails_the_copy_of_frozen_rows(uint64_t) {
  const int full = open("/dev/full", O_RDWR);
  if (full < 0) return;
  std::vector<uint8_t> rows(kForm.num_rows), pages(RowFile::bytes(kForm) / kPage);
  std::vector<int64_t> counts(kNumFileCounts);
  const int before = open_file(0), saved = dup(before);
  RowFile owner(open_file(RowFile::bytes(kForm)), before, open_file(1 << 20), kForm,
                {rows.data(), pages.data(), counts.data()}, Node::init(), kBudget);
  owner.to_write(1), owner.to_write(2);
  owner.freeze();
  CHECK(dup2(full, before) == before);
  owner.to_write(1);
  CHECK(dup2(saved, before) == before && owner.count(kBallastUsed) > 0);
  owner.to_write(2);  // is saved
  bool has_failed = false;
  try {
    check_all(first_values(), [&](auto... of) { owner.copy_frozen(of...); });
  } catch (const std::system_error& problem) {
    has_failed = problem.code().value() == ENOSPC;
  }
  CHECK(has_failed);
  close(full), close(saved);
}

void run_all(uint64_t seed) {
  rows_are_those_of_the_model(seed);
  frozen_rows_stay_as_they_were(seed);
  a_full_disk_takes_the_ballast_then_is_an_error(seed);
  a_row_that_could_not_be_saved_fails_the_copy_of_frozen_rows(seed);
}

}  // namespace
}  // namespace hetmpi

int main(int argc, char** argv) {
  hetmpi::run_all(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1);
  return 0;
}
