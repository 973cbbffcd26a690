#include "common/spec/scalar_field.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/status.h"
#include "common/units.h"
#include "common/utf8.h"

namespace upipe {
namespace {

using google::protobuf::EnumDescriptor;
using google::protobuf::EnumValueDescriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

bool IsTokenCount(const FieldDescriptor& field) {
  return field.full_name() == "upipe.v1.TrainSpec.context" ||
         field.full_name() == "upipe.v1.ModelSpec.window" ||
         field.full_name() == "upipe.v1.ModelSpec.max_position" ||
         field.full_name() == "upipe.v1.DeviceFile.AttentionRate.length" ||
         field.name() == "original_context";
}

bool IsByteCount(const FieldDescriptor& field) {
  return field.full_name() == "upipe.v1.TrainSpec.memory_per_rank" ||
         field.full_name() == "upipe.v1.DeviceFile.Bytes.bytes";
}

// Counts that the planner may choose: `auto` is 0.
bool MayBeAuto(const FieldDescriptor& field) {
  return field.full_name() == "upipe.v1.ParallelSpec.heads_per_stage" ||
         field.full_name() == "upipe.v1.ParallelSpec.ring_ranks";
}

bool HasAutoValue(const FieldDescriptor& field) {
  if (field.cpp_type() != FieldDescriptor::CPPTYPE_ENUM) return MayBeAuto(field);
  for (int i = 0; i < field.enum_type()->value_count(); ++i) {
    if (absl::EndsWith(field.enum_type()->value(i)->name(), "_AUTO")) return true;
  }
  return false;
}

// A text shortened for messages.
std::string Quoted(absl::string_view text) {
  if (text.size() > 80) return absl::StrCat("'", ToUtf8(text, 77), "...'");
  return absl::StrCat("'", text, "'");
}

absl::Status Wrong(absl::string_view text, absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat(Quoted(text), " is not ", expected));
}

// METHOD_UPIPE -> "upipe": without the enum's own name.
std::string ShortName(const EnumValueDescriptor& value) {
  std::string prefix;
  for (const char c : value.type()->name()) {
    if (absl::ascii_isupper(c) && !prefix.empty()) prefix += '_';
    prefix += absl::ascii_toupper(c);
  }
  return absl::AsciiStrToLower(absl::StartsWith(value.name(), prefix + "_")
                                   ? value.name().substr(prefix.size() + 1)
                                   : value.name());
}

absl::StatusOr<int> EnumNumber(const EnumDescriptor& type, absl::string_view text) {
  std::vector<std::string> names;
  for (int i = 0; i < type.value_count(); ++i) {
    const EnumValueDescriptor& value = *type.value(i);
    if (value.number() == 0) continue;  // UNSPECIFIED
    names.push_back(ShortName(value));
    if (names.back() == text) return value.number();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(Quoted(text), " is unknown", NearestName(text, names)));
}

// Digits with an optional sign; no leading zero, which YAML 1.1 reads as octal.
bool IsDecimal(absl::string_view text) {
  if (!text.empty() && (text[0] == '-' || text[0] == '+')) text.remove_prefix(1);
  return !text.empty() && std::all_of(text.begin(), text.end(), absl::ascii_isdigit) &&
         (text.size() == 1 || text[0] != '0');
}

template <typename Int>
absl::StatusOr<Int> WholeNumber(absl::string_view text) {
  Int value = 0;
  if (!IsDecimal(text)) return Wrong(text, "a whole number (decimal digits)");
  if (!absl::SimpleAtoi(text, &value)) {
    return Wrong(text, absl::StrCat("between ", std::numeric_limits<Int>::min(), " and ",
                                    std::numeric_limits<Int>::max()));
  }
  return value;
}

absl::StatusOr<double> RealNumber(absl::string_view text) {
  if (text == ".inf") return std::numeric_limits<double>::infinity();
  const bool legal = std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isdigit(c) || absl::StrContains("+-.eE", absl::string_view(&c, 1));
  });
  double value = 0;
  if (!legal || !absl::SimpleAtod(text, &value)) return Wrong(text, "a number");
  if (std::isinf(value)) return Wrong(text, "a number a double can hold");
  return value;
}

absl::StatusOr<int64_t> Int64Value(const FieldDescriptor& field, absl::string_view text) {
  if (absl::StartsWith(text, "-")) return WholeNumber<int64_t>(text);
  if (IsTokenCount(field)) return ParseTokenCount(text);
  if (IsByteCount(field)) return ParseBytes(text);
  return WholeNumber<int64_t>(text);
}

// Digits and the largest unit that leaves no remainder.
std::string ByteCountText(int64_t bytes) {
  constexpr std::array<const char*, 5> kUnits = {"", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  while (bytes != 0 && bytes % 1024 == 0 && unit + 1 < kUnits.size()) {
    bytes /= 1024;
    ++unit;
  }
  return absl::StrCat(bytes, kUnits[unit]);
}

std::string DoubleText(double value) {
  if (std::isinf(value)) return value > 0 ? ".inf" : "-.inf";
  if (std::isnan(value)) return ".nan";
  std::array<char, 32> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  return std::string(digits.data(), end);  // shortest that reads back equal
}

size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string TextScalar(const std::string& text) {
  const bool plain =
      !text.empty() && (absl::ascii_isalpha(text[0]) || text[0] == '/') && text != "auto" &&
      !absl::EqualsIgnoreCase(text, "null") && std::all_of(text.begin(), text.end(), [](char c) {
        return absl::ascii_isalnum(c) || absl::StrContains("_./-", absl::string_view(&c, 1));
      });
  if (plain) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      absl::StrAppendFormat(&quoted, "\\x%02x", static_cast<unsigned char>(c));
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

std::string NearestName(absl::string_view word, const std::vector<std::string>& names) {
  word = word.substr(0, 64);
  size_t best = std::numeric_limits<size_t>::max();
  const std::string* nearest = nullptr;
  for (const std::string& name : names) {
    const size_t distance = EditDistance(absl::AsciiStrToLower(word), name);
    if (distance < best) {
      best = distance;
      nearest = &name;
    }
  }
  if (nearest != nullptr &&
      best <= std::max<size_t>(1, std::min(word.size(), nearest->size()) / 3)) {
    return absl::StrCat("; did you mean '", *nearest, "'?");
  }
  return absl::StrCat("; known: ", absl::StrJoin(names, ", "));
}

absl::Status SetScalarField(const FieldDescriptor& field, absl::string_view text, bool quoted,
                            Message& message) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  const bool is_string = field.cpp_type() == FieldDescriptor::CPPTYPE_STRING;
  if (text == "auto" && !(quoted && is_string) && !HasAutoValue(field)) {
    return absl::InvalidArgumentError("auto is not available; name a value");
  }
  if (quoted && !is_string) {
    return absl::InvalidArgumentError(
        absl::StrCat(Quoted(text), " is text in quotes; write it without"));
  }
  if (MayBeAuto(field)) {
    if (text == "0")
      return Wrong(text, "a number of heads or ranks; auto lets the planner choose");
    if (text == "auto") text = "0";
  }
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      reflection.SetString(&message, &field, std::string(text));
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_BOOL:
      if (text != "true" && text != "on" && text != "false" && text != "off") {
        return Wrong(text, "true, false, on or off");
      }
      reflection.SetBool(&message, &field, text == "true" || text == "on");
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_INT32: {
      UPIPE_ASSIGN_OR_RETURN(const int32_t value, WholeNumber<int32_t>(text));
      reflection.SetInt32(&message, &field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_INT64: {
      UPIPE_ASSIGN_OR_RETURN(const int64_t value, Int64Value(field, text));
      reflection.SetInt64(&message, &field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_UINT64: {
      UPIPE_ASSIGN_OR_RETURN(const uint64_t value, WholeNumber<uint64_t>(text));
      reflection.SetUInt64(&message, &field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_DOUBLE: {
      UPIPE_ASSIGN_OR_RETURN(const double value, RealNumber(text));
      reflection.SetDouble(&message, &field, value);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_ENUM: {
      UPIPE_ASSIGN_OR_RETURN(const int number, EnumNumber(*field.enum_type(), text));
      reflection.SetEnumValue(&message, &field, number);
      return absl::OkStatus();
    }
    default:
      UPIPE_CHECK(false) << field.full_name() << " has a type that files have no spelling for";
      return absl::OkStatus();
  }
}

std::string ScalarFieldText(const Message& message, const FieldDescriptor& field) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_STRING:
      return TextScalar(reflection.GetString(message, &field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.GetBool(message, &field) ? "true" : "false";
    case FieldDescriptor::CPPTYPE_INT32: {
      const int32_t value = reflection.GetInt32(message, &field);
      return value == 0 && MayBeAuto(field) ? "auto" : absl::StrCat(value);
    }
    case FieldDescriptor::CPPTYPE_INT64: {
      const int64_t value = reflection.GetInt64(message, &field);
      if (value == 0 && MayBeAuto(field)) return "auto";
      if (IsTokenCount(field)) return FormatTokenCount(value);
      return IsByteCount(field) ? ByteCountText(value) : absl::StrCat(value);
    }
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(reflection.GetUInt64(message, &field));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return DoubleText(reflection.GetDouble(message, &field));
    case FieldDescriptor::CPPTYPE_ENUM:
      return ShortName(*reflection.GetEnum(message, &field));
    default:
      UPIPE_CHECK(false) << field.full_name() << " has a type that files have no spelling for";
      return "";
  }
}

}  // namespace upipe
