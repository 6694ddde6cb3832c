// Sections: a message of several tables is the number of 8-byte words of each table's section, then the sections.
#pragma once

#include <cstdint>
#include <numeric>
#include <stdexcept>
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

// Writes the lengths of a message's sections, in words. Returns where each of them begins.
inline std::vector<int64_t> write_lengths(const std::vector<int64_t>& lengths, int64_t* message) {
  std::vector<int64_t> begins;
  auto end = static_cast<int64_t>(lengths.size());
  for (const int64_t length : lengths) {
    *message++ = length;
    begins.push_back(end);
    end += length;
  }
  return begins;
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
