#include "common/spec/yaml_message.h"

#include <google/protobuf/descriptor.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <functional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/check.h"
#include "common/spec/scalar_field.h"
#include "common/utf8.h"

namespace upipe {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

std::string Join(absl::string_view path, absl::string_view name) {
  return path.empty() ? std::string(name) : absl::StrCat(path, ".", name);
}

std::vector<std::string> FieldNames(const Descriptor& type) {
  std::vector<std::string> names;
  for (int i = 0; i < type.field_count(); ++i) names.push_back(type.field(i)->name());
  return names;
}

bool IsMessage(const FieldDescriptor& field) {
  return field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
}

constexpr size_t kMaxListItems = 64;  // bounds what a check of the message goes through

// Lists are of messages or of texts.
void CheckListed(const FieldDescriptor& field) {
  UPIPE_CHECK(IsMessage(field) || field.cpp_type() == FieldDescriptor::CPPTYPE_STRING)
      << field.full_name() << " is a list of values that files have no spelling for";
}

const char* Describe(const YamlNode& node) {
  switch (node.kind) {
    case YamlNode::Kind::kNull:
      return "nothing";
    case YamlNode::Kind::kScalar:
      return "a single value";
    case YamlNode::Kind::kMap:
      return "fields of its own";
    case YamlNode::Kind::kSequence:
      return "a list";
  }
  return "";
}

void WriteFields(const Message& message, const std::string& indent, std::string& out);

void WriteList(const Message& message, const FieldDescriptor& field, const std::string& indent,
               std::string& out) {
  CheckListed(field);
  const Reflection& reflection = *message.GetReflection();
  absl::StrAppend(&out, indent, field.name(), ":\n");
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    if (!IsMessage(field)) {
      absl::StrAppend(&out, indent, "  - ",
                      TextScalar(reflection.GetRepeatedString(message, &field, i)), "\n");
      continue;
    }
    std::string fields;
    WriteFields(reflection.GetRepeatedMessage(message, &field, i), indent + "    ", fields);
    if (fields.empty()) fields = "{}\n";
    absl::string_view item = fields;
    absl::ConsumePrefix(&item, indent + "    ");
    absl::StrAppend(&out, indent, "  - ", item);
  }
}

void WriteFields(const Message& message, const std::string& indent, std::string& out) {
  const Reflection& reflection = *message.GetReflection();
  const Descriptor& type = *message.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    if (field.is_repeated()) {
      if (reflection.FieldSize(message, &field) > 0) WriteList(message, field, indent, out);
    } else if (!reflection.HasField(message, &field)) {
      continue;
    } else if (!IsMessage(field)) {
      absl::StrAppend(&out, indent, field.name(), ": ", ScalarFieldText(message, field), "\n");
    } else {
      std::string fields;
      WriteFields(reflection.GetMessage(message, &field), indent + "  ", fields);
      absl::StrAppend(&out, indent, field.name(), fields.empty() ? ": {}\n" : ":\n", fields);
    }
  }
}

}  // namespace

YamlMessageReader::YamlMessageReader(absl::string_view filename, absl::string_view noun,
                                     Message& message, Origins origins)
    : filename_(filename), noun_(noun), origins_(std::move(origins)), message_(message) {}

void YamlMessageReader::ReadText(absl::string_view text, size_t bytes_max) {
  if (text.size() > bytes_max) {
    Fail(1, "",
         absl::StrCat("has ", text.size(), " bytes; a ", noun_, " file has at most ", bytes_max));
    return;
  }
  YamlNode root;
  for (const YamlError& error : ParseYamlTree(text, noun_, root)) {
    Fail(error.line, "", error.message);
  }
  has_fields_ = errors_.empty() && root.kind == YamlNode::Kind::kMap;
  if (errors_.empty()) ReadFields(root, "", message_);
}

void YamlMessageReader::Override(absl::string_view path, absl::string_view value) {
  Message* message = &message_;
  std::string at;
  std::function<void()> restore;  // a section that only the walk made
  const std::vector<std::string> names = absl::StrSplit(path, '.');
  for (size_t i = 0; i < names.size(); ++i) {
    const FieldDescriptor* field = message->GetDescriptor()->FindFieldByName(names[i]);
    if (field == nullptr) {
      FailUnknown(kOverride, at, names[i], *message->GetDescriptor());
      return;
    }
    at = Join(at, names[i]);
    const bool last = i + 1 == names.size();
    const auto clear = [message, field] { message->GetReflection()->ClearField(message, field); };
    if (last && value.empty()) {
      lines_[at] = kOverride;
      clear();
    } else if (field->is_repeated()) {
      Fail(kOverride, at, "is a list; write it into the file");
      return;
    } else if (IsMessage(*field) == last) {
      Fail(kOverride, at,
           last ? "has fields of its own; name one of them, separated by '.'"
                : "is a single value without fields");
      return;
    } else if (last) {
      SetScalar(kOverride, at, *field, value, false, *message);
    } else {
      if (value.empty() && !restore && !message->GetReflection()->HasField(*message, field))
        restore = clear;
      message = message->GetReflection()->MutableMessage(message, field);
    }
  }
  if (restore) restore();
}

void YamlMessageReader::Fail(int line, absl::string_view path, absl::string_view message) {
  const std::string place =
      line == kOverride ? std::string("--set") : absl::StrCat(filename_, ":", line);
  errors_.push_back({line, absl::StrCat(place, ": ", path, path.empty() ? "" : ": ", message)});
  failed_.insert(std::string(path));
}

void YamlMessageReader::FailAll(const std::vector<Violation>& violations) {
  if (!has_fields_) return;
  for (const Violation& violation : violations) {
    if (IsReported(violation.field)) continue;
    Fail(LineOf(violation.field), violation.field, violation.message);
  }
}

int YamlMessageReader::LineOf(absl::string_view path) const {
  while (!path.empty()) {
    std::vector<std::string> places;
    const auto origins = origins_.find(std::string(path));
    if (origins != origins_.end()) places = origins->second;
    places.push_back(std::string(path));
    for (const std::string& place : places) {
      const auto found = lines_.find(place);
      if (found != lines_.end()) return found->second;
    }
    const size_t end = path.find_last_of(".[");
    path = path.substr(0, end == absl::string_view::npos ? 0 : end);
  }
  return 1;
}

absl::Status YamlMessageReader::status() const {
  if (errors_.empty()) return absl::OkStatus();
  std::vector<Error> errors = errors_;
  std::stable_sort(errors.begin(), errors.end(),
                   [](const Error& a, const Error& b) { return a.line < b.line; });
  return absl::InvalidArgumentError(absl::StrJoin(
      errors, "\n",
      [](std::string* out, const Error& error) { absl::StrAppend(out, error.text); }));
}

void YamlMessageReader::FailUnknown(int line, absl::string_view path, absl::string_view name,
                                    const Descriptor& type) {
  Fail(line, Join(path, ToUtf8(name, 80)),
       absl::StrCat("unknown field", NearestName(name, FieldNames(type))));
}

void YamlMessageReader::SetScalar(int line, const std::string& path, const FieldDescriptor& field,
                                  absl::string_view text, bool quoted, Message& message) {
  lines_[path] = line;
  const absl::Status set = SetScalarField(field, text, quoted, message);
  if (!set.ok()) {
    Fail(line, path, set.message());
  } else if (!field.has_presence() && field.cpp_type() == FieldDescriptor::CPPTYPE_INT64 &&
             message.GetReflection()->GetInt64(message, &field) == 0) {
    Fail(line, path, "is 0; give a number above it or remove the line");
  }
}

void YamlMessageReader::ReadFields(const YamlNode& node, const std::string& path,
                                   Message& message) {
  if (node.kind != YamlNode::Kind::kMap) {
    Fail(node.line, path,
         absl::StrCat("fields are expected, such as ", message.GetDescriptor()->field(0)->name(),
                      ", but ", Describe(node), " is given"));
    return;
  }
  std::map<std::string, int> first_lines;
  for (size_t i = 0; i + 1 < node.children.size(); i += 2) {
    const YamlNode& key = node.children[i];
    if (key.kind != YamlNode::Kind::kScalar) {
      Fail(key.line, path,
           absl::StrCat("a field name is expected, but ", Describe(key), " is given"));
      continue;
    }
    const FieldDescriptor* field = message.GetDescriptor()->FindFieldByName(key.scalar);
    const auto [first, is_new] = first_lines.emplace(key.scalar, key.line);
    if (field == nullptr) {
      FailUnknown(key.line, path, key.scalar, *message.GetDescriptor());
    } else if (!is_new) {
      Fail(key.line, Join(path, key.scalar),
           absl::StrCat("given twice; first on line ", first->second));
    } else {
      ReadField(*field, key, node.children[i + 1], path, message);
    }
  }
}

void YamlMessageReader::ReadField(const FieldDescriptor& field, const YamlNode& key,
                                  const YamlNode& value, const std::string& parent_path,
                                  Message& message) {
  const std::string path = Join(parent_path, field.name());
  lines_[path] = key.line;
  if (value.kind == YamlNode::Kind::kNull) {
    Fail(key.line, path, "has no value; give one or remove the line");
  } else if (field.is_repeated()) {
    ReadList(field, key, value, path, message);
  } else if (IsMessage(field)) {
    ReadFields(value, path, *message.GetReflection()->MutableMessage(&message, &field));
  } else if (value.kind != YamlNode::Kind::kScalar) {
    Fail(key.line, path,
         absl::StrCat("a single value is expected, but ", Describe(value), " is given"));
  } else {
    SetScalar(key.line, path, field, value.scalar, value.quoted, message);
  }
}

void YamlMessageReader::ReadList(const FieldDescriptor& field, const YamlNode& key,
                                 const YamlNode& value, const std::string& path, Message& message) {
  CheckListed(field);
  if (value.kind != YamlNode::Kind::kSequence) {
    Fail(key.line, path, absl::StrCat("a list is expected, but ", Describe(value), " is given"));
    return;
  }
  if (value.children.size() > kMaxListItems) {
    Fail(key.line, path,
         absl::StrCat("has ", value.children.size(), " items; at most ", kMaxListItems));
    return;
  }
  const Reflection& reflection = *message.GetReflection();
  for (size_t i = 0; i < value.children.size(); ++i) {
    const YamlNode& item = value.children[i];
    const std::string item_path = absl::StrCat(path, "[", i, "]");
    lines_[item_path] = item.line;
    if (IsMessage(field)) {
      ReadFields(item, item_path, *reflection.AddMessage(&message, &field));
    } else if (item.kind == YamlNode::Kind::kScalar) {
      reflection.AddString(&message, &field, item.scalar);
    } else {
      Fail(item.line, item_path,
           absl::StrCat("a single value is expected, but ", Describe(item), " is given"));
    }
  }
}

// Whether `path` or a field around it is wrong already.
bool YamlMessageReader::IsReported(absl::string_view path) const {
  while (!path.empty()) {
    if (failed_.count(std::string(path)) > 0) return true;
    const size_t end = path.find_last_of(".[");
    path = path.substr(0, end == absl::string_view::npos ? 0 : end);
  }
  return false;
}

std::string MessageToYaml(const Message& message) {
  std::string out;
  WriteFields(message, "", out);
  return out;
}

absl::StatusOr<std::string> ReadTextFile(const std::string& path, size_t bytes_max,
                                         absl::string_view what) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text(bytes_max + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.is_open() || file.bad()) {
    return absl::ErrnoToStatus(errno != 0 ? errno : EIO, absl::StrCat("cannot read ", what, path));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

}  // namespace upipe
