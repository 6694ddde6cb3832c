// Sections: a message of several tables is the number of 8-byte words of each table's section, then the sections.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

namespace hetmpi {

struct Section {
  const int64_t* at;
  int64_t num_words;
};

// Words of the message that begins with the lengths of these sections.
inline int64_t message_words(const int64_t* lengths, int64_t num_tables) {
  return std::accumulate(lengths, lengths + num_tables, num_tables);
}

// The words of a message, and what keeps them in memory.
struct Words {
  const int64_t* at = nullptr;
  int64_t num = 0;
  std::shared_ptr<const void> owner;
};

inline Words words_of(std::vector<int64_t> message) {
  auto kept = std::make_shared<const std::vector<int64_t>>(std::move(message));
  return {kept->data(), static_cast<int64_t>(kept->size()), kept};
}

// A message whose sections have these lengths, in words. write(table, at): writes the section of a table.
template <typename Write>
Words message_of_sections(const std::vector<int64_t>& lengths, Write write) {
  const int64_t num_words = message_words(lengths.data(), static_cast<int64_t>(lengths.size()));
  const std::shared_ptr<int64_t[]> message(new int64_t[num_words]);  // not set to zero first
  int64_t* section = std::copy(lengths.begin(), lengths.end(), message.get());
  for (size_t table = 0; table < lengths.size(); section += lengths[table++]) write(table, section);
  return {message.get(), num_words, message};
}

// The section of each table. Throws std::out_of_range if they exceed the message.
inline std::vector<Section> sections_of(const int64_t* message, int64_t num_words, int64_t num_tables) {
  const auto require = [](bool is_whole) {
    if (!is_whole) throw std::out_of_range("a section exceeds its message");
  };
  require(num_words >= num_tables);
  std::vector<Section> sections;
  int64_t begin = num_tables;
  for (int64_t table = 0; table < num_tables; ++table) {
    const int64_t length = message[table];
    require(length >= 0 && length <= num_words - begin);
    sections.push_back({message + begin, length});
    begin += length;
  }
  return sections;
}

}  // namespace hetmpi
