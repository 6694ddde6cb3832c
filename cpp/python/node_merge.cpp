// Pulls and pushes of a node's ranks, merged by their collectors; and the boards on which they write them.
#include "wire/node_merge.h"

#include <numeric>
#include <optional>

#include "python/arrays.h"
#include "python/bindings.h"
#include "python/owner_arrays.h"
#include "wire/board.h"

namespace hetmpi {
namespace {

using Messages = std::vector<Array<int64_t>>;

std::vector<Words> words_of(const Messages& messages) {
  std::vector<Words> found;
  for (const auto& message : messages) found.push_back({message.data(), message.shape(0)});
  return found;
}

template <typename T>
Array<T> array_of(const std::vector<T>& values) {
  return Array<T>(static_cast<ssize_t>(values.size()), values.data());
}

py::tuple route_of(const MergedKeys& merged) {
  const auto n = static_cast<ssize_t>(merged.keys.size());
  Array<int64_t> order(n);
  std::iota(order.mutable_data(), order.mutable_data() + n, 0);
  return py::make_tuple(order, array_of(merged.keys), array_of(merged.first));
}

class PyBoard {
 public:
  PyBoard(std::vector<Array<uint8_t>> areas, int64_t own) : areas_(std::move(areas)), core_(headers(areas_), own) {}

  Board& core() { return core_; }

 private:
  static std::vector<BoardHeader*> headers(std::vector<Array<uint8_t>>& areas) {
    std::vector<BoardHeader*> found;
    for (auto& area : areas) {
      if (area.nbytes() < static_cast<ssize_t>(sizeof(BoardHeader)))
        throw std::invalid_argument("board: an area is shorter than its header");
      found.push_back(reinterpret_cast<BoardHeader*>(area.mutable_data()));
    }
    return found;
  }

  std::vector<Array<uint8_t>> areas_;
  Board core_;
};

int64_t board_route_words(int64_t num_ranks, int64_t n, int64_t dim) {
  return BoardRoute::words(num_ranks, n, sizeof(float) * dim);
}

void write_board_route(Array<int64_t> message, const Array<int64_t>& order, const Array<int64_t>& keys,
                       const Array<int64_t>& first, const std::optional<Array<float>>& values) {
  const ssize_t n = keys.shape(0), num_first = first.shape(0), dim = values ? values->shape(1) : 0;
  check_shape(order, "order", {n});
  check_shape(message, "message", {board_route_words(num_first - 1, n, dim)});
  if (values) check_in(order.data(), n, values->shape(0), "order");
  int64_t* at = std::copy_n(first.data(), num_first, message.mutable_data());
  auto* to = reinterpret_cast<float*>(std::copy_n(keys.data(), n, at));
  const float* from = values ? values->data() : nullptr;
  const int64_t* place = order.data();
  py::gil_scoped_release release;
  if (from)
    for (ssize_t i = 0; i < n; ++i) std::copy_n(from + place[i] * dim, dim, to + i * dim);
}

// The collectors of a node, on one of its ranks.
class NodeMerge {
 public:
  // owners: the ranks that each rank of the node collects for, ascending. place: of this rank in the node. blocks: the
  // node's ranks, as RankBlock.
  NodeMerge(std::vector<std::vector<int64_t>> owners, int64_t place,
            const std::vector<std::pair<int64_t, int64_t>>& blocks, int64_t num_ranks)
      : owners_(std::move(owners)), place_(place), blocks_(blocks_of(blocks)), num_ranks_(num_ranks) {
    if (place < 0 || place >= static_cast<int64_t>(owners_.size()))
      throw std::out_of_range("place must be that of a rank of the node");
  }

  NodePull pull(const Messages& pulls) const {
    const std::vector<Words> words = words_of(pulls);
    py::gil_scoped_release release;
    return NodePull(words, owners_[place_], num_ranks_);
  }

  // Copies the rows of all collectors' replies to their positions in out (n, width).
  void place(const Messages& replies, const Array<int64_t>& order, const Array<int64_t>& first,
             Array<float> out) const {
    check_shape(out, "out", {-1, -1});
    check_shape(first, "first", {num_ranks_ + 1});
    check_in(order.data(), order.shape(0), out.shape(0), "order");
    const std::vector<Words> words = words_of(replies);
    const int64_t *position = order.data(), *begin = first.data();
    float* to = out.mutable_data();
    const int64_t width = out.shape(1);
    py::gil_scoped_release release;
    for (size_t i = 0; i < owners_.size(); ++i)
      place_reply(words.at(i), owners_.size(), place_, owners_[i], position, begin, to, width);
  }

  // (order, keys, first, values) of the merged push of each block.
  std::vector<py::tuple> push(const Messages& pushes, int64_t dim) const {
    const std::vector<Words> words = words_of(pushes);
    if (words.size() != owners_.size()) throw std::out_of_range("there must be one message per rank of the node");
    std::vector<py::tuple> found;
    auto begin = words.begin();
    for (const RankBlock& block : blocks_) {
      const auto end = begin + (block.last - block.first + 1);
      std::optional<NodePush> push;
      {
        py::gil_scoped_release release;
        push.emplace(std::vector<Words>(begin, end), block, owners_[place_], num_ranks_, dim);
      }
      begin = end;
      const py::tuple route = route_of(push->merged());
      Array<float> values({static_cast<ssize_t>(push->merged().keys.size()), static_cast<ssize_t>(dim)});
      float* sums = values.mutable_data();
      {
        py::gil_scoped_release release;
        push->write_sums(sums);
      }
      found.push_back(py::make_tuple(route[0], route[1], route[2], values));
    }
    return found;
  }

 private:
  std::vector<std::vector<int64_t>> owners_;
  int64_t place_;
  std::vector<RankBlock> blocks_;
  int64_t num_ranks_;
};

}  // namespace

void bind_node_merge(py::module_& m) {
  m.attr("BOARD_HEADER_BYTES") = sizeof(BoardHeader);
  py::class_<PyBoard>(m, "Board", "Messages among the ranks of a node (cpp/wire/board.h).")
      .def(py::init<std::vector<Array<uint8_t>>, int64_t>(), py::arg("areas"), py::arg("own"))
      .def(
          "post",
          [](PyBoard& board, int64_t turn, int64_t num_words, int64_t kind) {
            board.core().post(turn, num_words, kind);
          },
          py::arg("turn"), py::arg("num_words"), py::arg("kind"))
      .def("is_of_one_kind", [](PyBoard& board) { return board.core().is_of_one_kind(); })
      .def(
          "is_posted", [](PyBoard& board, int64_t turn) { return board.core().is_posted(turn); }, py::arg("turn"))
      .def("num_words", [](PyBoard& board) { return board.core().num_words(); });
  py::class_<NodePull>(m, "NodePull", "The rows that a node's ranks pull from a collector (cpp/wire/node_merge.h).")
      .def(
          "route", [](const NodePull& pull) { return route_of(pull.merged()); }, "order, keys and first of a Route.")
      .def("head_words", &NodePull::head_words)
      .def(
          "write_head",
          [](const NodePull& pull, Array<int64_t> head) {
            check_shape(head, "head", {pull.head_words()});
            pull.write_head(head.mutable_data());
          },
          py::arg("head").noconvert());
  m.def("board_route_words", &board_route_words, py::arg("num_ranks"), py::arg("n"), py::arg("dim"),
        "Words of a pull (dim 0) or push of n keys.");
  m.def("write_board_route", &write_board_route, py::arg("message").noconvert(), py::arg("order").noconvert(),
        py::arg("keys").noconvert(), py::arg("first").noconvert(), py::arg("values").noconvert(),
        "Writes a pull, or, with values (*, dim) float32, a push.");
  py::class_<NodeMerge>(m, "NodeMerge", "Merges what the ranks of a node pull and push (cpp/wire/node_merge.h).")
      .def(py::init<std::vector<std::vector<int64_t>>, int64_t, const std::vector<std::pair<int64_t, int64_t>>&,
                    int64_t>(),
           py::arg("owners"), py::arg("place"), py::arg("blocks"), py::arg("num_ranks"))
      .def("pull", &NodeMerge::pull, py::arg("pulls"), "The pulls of all ranks, for this collector.")
      .def("place", &NodeMerge::place, py::arg("replies"), py::arg("order").noconvert(), py::arg("first").noconvert(),
           py::arg("out").noconvert(),
           "Copies the rows of all collectors' replies to their positions in out (n, width).")
      .def("push", &NodeMerge::push, py::arg("pushes"), py::arg("dim"),
           "(order, keys, first, values) of the merged push of each block.");
}

}  // namespace hetmpi
