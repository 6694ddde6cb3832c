// One text for each value, however a program has written it, so that the same rows in CSV and in Parquet, or in CSV of
// two programs, get the same ids:
//   booleans    true, false                      of True, TRUE
//   numbers     3, 0.1, 1e-05, 1e+20, 0          of 3.0, 0.1, 0.00001, 1.0E20, -0
//   timestamps  2024-05-01 12:30:00.25 in UTC    of 2024-05-01T12:30:00.250000Z, 2024-05-01 14:30:00.25+02:00
//               2024-05-01 at midnight
//   times       12:30:00                         of 12:30:00.000000
// All other texts stay as they are, 3.10 too, which may be a version.
#pragma once

#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string_view>
#include <type_traits>

namespace hetmpi {

class CanonicalText {
 public:
  // The canonical form of a text, valid until the next call.
  std::string_view of(std::string_view text) {
    if (text == "-0") return "0";
    if (text.size() < 3 || text.size() > kLongest) return text;
    const char first = text[0];
    if (first == 't' || first == 'T' || first == 'f' || first == 'F') return of_boolean(text);
    if (first != '-' && !is_digit(first)) return text;
    if (text.size() >= 10 && is_date(text)) return text.size() == 10 ? text : of_timestamp(text);
    if (text[2] == ':') return of_time(text);
    return is_written_anew(text) ? of_float(text) : text;
  }

  // The shortest text that gives the same number; integers without a point.
  template <typename Float>
  std::string_view of_number(Float value) {
    if constexpr (std::is_same_v<Float, float>)
      if (std::fabs(value) >= kLargestExactFloat) return of_number(shortest(value));
    char* end;
    if (std::trunc(value) == value && std::fabs(value) < 9e18)
      end = std::to_chars(buffer_, buffer_ + sizeof buffer_, static_cast<int64_t>(value)).ptr;
    else
      end = std::to_chars(buffer_, buffer_ + sizeof buffer_, value).ptr;
    return {buffer_, static_cast<size_t>(end - buffer_)};
  }

 private:
  static constexpr size_t kLongest = 48;
  static constexpr float kLargestExactFloat = 1 << 24;  // beyond it programs write fewer digits than the integer has

  // The number of which a program writes the digits for `value`, finite or not.
  static double shortest(float value) {
    char text[32];
    const char* const end = std::to_chars(text, text + sizeof text, value, std::chars_format::scientific).ptr;
    double number = value;
    std::from_chars(text, end, number);
    return number;
  }

  static bool is_digit(char c) { return c >= '0' && c <= '9'; }

  static std::string_view of_boolean(std::string_view text) {
    for (const std::string_view word : {std::string_view("true"), std::string_view("false")}) {
      bool is_word = text.size() == word.size();
      for (size_t i = 0; is_word && i < word.size(); ++i) is_word = (text[i] | 0x20) == word[i];
      if (is_word) return word;
    }
    return text;
  }

  // Whether a number has another canonical form than its text, by its form: digits, a point and zeros; a power with a
  // sign or after a point (without both it may be a hexadecimal id); less than 0.001.
  static bool is_written_anew(std::string_view text) {
    size_t i = text[0] == '-';
    const size_t begin = i;
    while (i < text.size() && is_digit(text[i])) ++i;
    if (i == begin) return false;
    const bool is_small = text.substr(begin, 5) == "0.000";
    const bool has_point = i < text.size() && text[i] == '.';
    if (has_point) {
      const size_t point = i++;
      bool has_only_zeros = true;
      for (; i < text.size() && is_digit(text[i]); ++i) has_only_zeros &= text[i] == '0';
      if (i == text.size()) return i > point + 1 && (has_only_zeros || is_small);
    }
    if (i + 1 >= text.size() || (text[i] | 0x20) != 'e') return false;
    const bool has_sign = text[i + 1] == '-' || text[i + 1] == '+';
    const size_t power = i + 1 + has_sign;
    for (i = power; i < text.size(); ++i)
      if (!is_digit(text[i])) return false;
    return i > power && (has_sign || has_point);
  }

  std::string_view of_float(std::string_view text) {
    const size_t point = text.find('.');
    if (point != text.npos && point < 19 && text.find_first_not_of('0', point + 1) == text.npos)
      return text.substr(0, point) == "-0" ? "0"
                                           : text.substr(0, point);  // exact, also of integers that no double holds
    double value = 0;
    const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
    return parsed.ec == std::errc() ? of_number(value) : text;
  }

  static bool is_date(std::string_view text) {
    for (const size_t i : {0, 1, 2, 3, 5, 6, 8, 9})
      if (!is_digit(text[i])) return false;
    return text[4] == '-' && text[7] == '-';
  }

  // The fraction of a second that begins at text[at], without zeros at its end; moves `at` behind it.
  static std::string_view fraction_of(std::string_view text, size_t& at) {
    const size_t begin = at;
    if (at < text.size() && text[at] == '.')
      for (++at; at < text.size() && is_digit(text[at]);) ++at;
    size_t end = at;
    while (end > begin && (text[end - 1] == '0' || text[end - 1] == '.')) --end;
    return text.substr(begin, end - begin);
  }

  static bool is_clock(std::string_view text, size_t at) {
    if (text.size() < at + 8 || text[at + 2] != ':' || text[at + 5] != ':') return false;
    for (const size_t i : {0, 1, 3, 4, 6, 7})
      if (!is_digit(text[at + i])) return false;
    return true;
  }

  static int two(std::string_view text, size_t at) { return 10 * (text[at] - '0') + (text[at + 1] - '0'); }

  std::string_view of_time(std::string_view text) {
    if (!is_clock(text, 0)) return text;
    size_t at = 8;
    const std::string_view fraction = fraction_of(text, at);
    return at == text.size() ? text.substr(0, 8 + fraction.size()) : text;
  }

  std::string_view of_timestamp(std::string_view text) {
    if ((text[10] != ' ' && text[10] != 'T') || !is_clock(text, 11)) return text;
    size_t at = 19;
    const std::string_view fraction = fraction_of(text, at);
    int64_t offset_minutes = 0;
    if (!parse_zone(text.substr(at), offset_minutes)) return text;
    const int year = 100 * two(text, 0) + two(text, 2), month = two(text, 5), day = two(text, 8);
    if (month < 1 || month > 12 || day < 1 || day > 31) return text;
    int64_t minutes = 1440 * days_of(year, month, day) + 60 * two(text, 11) + two(text, 14) - offset_minutes;
    const int64_t days = minutes >= 0 ? minutes / 1440 : (minutes - 1439) / 1440;
    minutes -= 1440 * days;
    const int seconds = two(text, 17);
    int y, m, d;
    date_of(days, y, m, d);
    if (y < 0 || y > 9999) return text;
    int size = std::snprintf(buffer_, sizeof buffer_, "%04d-%02d-%02d", y, m, d);
    if (minutes || seconds || !fraction.empty())
      size +=
          std::snprintf(buffer_ + size, sizeof buffer_ - size, " %02d:%02d:%02d%.*s", static_cast<int>(minutes / 60),
                        static_cast<int>(minutes % 60), seconds, static_cast<int>(fraction.size()), fraction.data());
    return {buffer_, static_cast<size_t>(size)};
  }

  // Whether a text is empty, Z, +hh, +hhmm or +hh:mm; offset_minutes: east of UTC.
  static bool parse_zone(std::string_view text, int64_t& offset_minutes) {
    if (text.empty() || text == "Z") return true;
    if (text[0] != '+' && text[0] != '-') return false;
    const bool has_colon = text.size() == 6 && text[3] == ':';
    if (text.size() != 3 && text.size() != 5 && !has_colon) return false;
    for (size_t i = 1; i < text.size(); ++i)
      if (!is_digit(text[i]) && !(has_colon && i == 3)) return false;
    offset_minutes = 60 * two(text, 1) + (text.size() == 3 ? 0 : two(text, has_colon ? 4 : 3));
    if (text[0] == '-') offset_minutes = -offset_minutes;
    return true;
  }

  // Days since 1970-01-01 of a date of the Gregorian calendar, and back: counted in eras of 400 years from March on.
  static int64_t days_of(int year, int month, int day) {
    const int64_t y = year - (month <= 2), era = (y >= 0 ? y : y - 399) / 400, of_era = y - 400 * era;
    const int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
    return 146097 * era + 365 * of_era + of_era / 4 - of_era / 100 + of_year - 719468;
  }

  static void date_of(int64_t days, int& year, int& month, int& day) {
    days += 719468;
    const int64_t era = (days >= 0 ? days : days - 146096) / 146097, rest = days - 146097 * era;
    const int64_t of_era = (rest - rest / 1460 + rest / 36524 - rest / 146096) / 365;
    const int64_t of_year = rest - (365 * of_era + of_era / 4 - of_era / 100), part = (5 * of_year + 2) / 153;
    day = static_cast<int>(of_year - (153 * part + 2) / 5 + 1);
    month = static_cast<int>(part + (part < 10 ? 3 : -9));
    year = static_cast<int>(of_era + 400 * era + (month <= 2));
  }

  char buffer_[96];
};

}  // namespace hetmpi
