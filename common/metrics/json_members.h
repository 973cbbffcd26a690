// Members of JSON objects that somebody else may have written: a member of the wrong kind, or a
// number that does not fit, is an exception, which the caller's parser catches.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace upipe {

using Json = nlohmann::ordered_json;

// nlohmann converts a number that is too large as C++ does: it wraps or is undefined. From -largest
// to largest.
inline int64_t Integer(const Json& value, int64_t largest = std::numeric_limits<int64_t>::max()) {
  const bool fits = value.is_number_unsigned()
                        ? value.get<uint64_t>() <= static_cast<uint64_t>(largest)
                        : value.is_number_integer() && value.get<int64_t>() >= -largest;
  if (!fits) {
    throw std::out_of_range(value.dump() + " is no integer up to " + std::to_string(largest));
  }
  return value.get<int64_t>();
}

// As it is, if it is an object.
inline const Json& Object(const Json& value) {
  if (!value.is_object()) throw std::out_of_range(value.dump() + " is no object");
  return value;
}

// Zero where `object` has no such member.
inline int64_t IntegerOf(const Json& object, const char* name) {
  if (!object.is_object()) throw std::out_of_range(std::string("no object holds ") + name);
  const auto found = object.find(name);
  return found == object.end() ? 0 : Integer(*found);
}

// NaN for null.
inline double Number(const Json& value) {
  return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
}

// Zero where `object` has no such member.
inline double NumberOf(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() ? 0 : Number(*found);
}

}  // namespace upipe
