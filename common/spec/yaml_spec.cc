#include "common/spec/yaml_spec.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/check.h"
#include "common/spec/job_spec.h"
#include "common/spec/scalar_field.h"
#include "common/spec/yaml_tree.h"
#include "common/status.h"
#include "common/utf8.h"

namespace upipe {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

std::string Join(absl::string_view path, absl::string_view name) {
  return path.empty() ? std::string(name) : absl::StrCat(path, ".", name);
}

std::vector<std::string> FieldNames(const Descriptor& type) {
  std::vector<std::string> names;
  for (int i = 0; i < type.field_count(); ++i) names.push_back(type.field(i)->name());
  return names;
}

const FieldDescriptor* FindField(const Descriptor& type, const std::string& name) {
  const FieldDescriptor* field = type.FindFieldByName(name);
  UPIPE_CHECK(field == nullptr || !field->is_repeated()) << field->full_name() << " is repeated";
  return field;
}

bool IsMessage(const FieldDescriptor& field) {
  return field.cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE;
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

// Fills one JobSpec from a tree and overrides, collecting what is wrong and where each field was
// given.
class SpecReader {
 public:
  explicit SpecReader(absl::string_view filename) : filename_(filename) {}

  void ReadFile(absl::string_view text) {
    if (text.size() > kMaxJobSpecBytes) {
      Fail(AtLine(1), "",
           absl::StrCat("has ", text.size(), " bytes; a job file has at most ", kMaxJobSpecBytes));
      return;
    }
    YamlNode root;
    for (const YamlError& error : ParseYamlTree(text, root))
      Fail(AtLine(error.line), "", error.message);
    has_fields_ = violations_.empty() && root.kind == YamlNode::Kind::kMap;
    if (violations_.empty()) ReadFields(root, "", spec_);
  }

  void ReadOverride(absl::string_view text) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
    const std::string clean = ToUtf8(text, text.size());
    if (clean != text) {
      Fail("--set", "", absl::StrCat("'", clean, "' has bytes that are not part of UTF-8 text"));
      return;
    }
    if (!absl::StrContains(text, '=')) {
      Fail("--set", "",
           absl::StrCat("'", text.substr(0, 80), "' has no '='; write path=value, e.g. ",
                        "train.steps=100"));
      return;
    }
    Message* message = &spec_;
    std::string path;
    const std::vector<std::string> names = absl::StrSplit(parts.first, '.');
    for (size_t i = 0; i < names.size(); ++i) {
      const FieldDescriptor* field = FindField(*message->GetDescriptor(), names[i]);
      if (field == nullptr) {
        FailUnknown("--set", path, names[i], *message->GetDescriptor());
        return;
      }
      path = Join(path, names[i]);
      if (IsMessage(*field) != (i + 1 < names.size())) {
        Fail("--set", path,
             IsMessage(*field) ? "has fields of its own; name one of them, separated by '.'"
                               : "is a single value without fields");
        return;
      }
      if (IsMessage(*field)) {
        message = message->GetReflection()->MutableMessage(message, field);
      } else {
        SetScalar("--set", path, *field, parts.second, false, *message);
      }
    }
  }

  // Everything wrong with the text, then with the values it gave. A field already reported is not
  // reported again, and a text that is no set of fields is not also told which ones it lacks.
  std::vector<std::string> Finish() {
    if (has_fields_) {
      for (const Violation& violation : ValidateJobSpec(spec_)) {
        if (!IsReported(violation.field)) {
          Fail(LocationOf(violation.field), violation.field, violation.message);
        }
      }
    }
    return std::move(violations_);
  }

  v1::JobSpec TakeSpec() { return std::move(spec_); }

 private:
  std::string AtLine(int line) const { return absl::StrCat(filename_, ":", line); }

  void Fail(absl::string_view location, absl::string_view path, absl::string_view message) {
    violations_.push_back(path.empty() ? absl::StrCat(location, ": ", message)
                                       : absl::StrCat(location, ": ", path, ": ", message));
    failed_.insert(std::string(path));
  }

  void FailUnknown(absl::string_view location, absl::string_view path, absl::string_view name,
                   const Descriptor& type) {
    Fail(location, Join(path, name.substr(0, 80)),
         absl::StrCat("unknown field", NearestName(name, FieldNames(type))));
  }

  void SetScalar(const std::string& location, const std::string& path, const FieldDescriptor& field,
                 absl::string_view text, bool quoted, Message& message) {
    locations_[path] = location;
    const absl::Status set = SetScalarField(field, text, quoted, message);
    if (!set.ok()) Fail(location, path, set.message());
  }

  void ReadFields(const YamlNode& node, const std::string& path, Message& message) {
    if (node.kind != YamlNode::Kind::kMap) {
      Fail(AtLine(node.line), path,
           absl::StrCat("fields are expected, such as ", message.GetDescriptor()->field(0)->name(),
                        ", but ", Describe(node), " is given"));
      return;
    }
    std::map<std::string, int> first_lines;
    for (size_t i = 0; i + 1 < node.children.size(); i += 2) {
      const YamlNode& key = node.children[i];
      if (key.kind != YamlNode::Kind::kScalar) {
        Fail(AtLine(key.line), path,
             absl::StrCat("a field name is expected, but ", Describe(key), " is given"));
        continue;
      }
      const FieldDescriptor* field = FindField(*message.GetDescriptor(), key.scalar);
      const auto [first, is_new] = first_lines.emplace(key.scalar, key.line);
      if (field == nullptr) {
        FailUnknown(AtLine(key.line), path, key.scalar, *message.GetDescriptor());
      } else if (!is_new) {
        Fail(AtLine(key.line), Join(path, key.scalar),
             absl::StrCat("given twice; first on line ", first->second));
      } else {
        ReadField(*field, key, node.children[i + 1], path, message);
      }
    }
  }

  void ReadField(const FieldDescriptor& field, const YamlNode& key, const YamlNode& value,
                 const std::string& parent_path, Message& message) {
    const std::string path = Join(parent_path, field.name());
    const std::string location = AtLine(key.line);
    locations_[path] = location;
    if (value.kind == YamlNode::Kind::kNull) {
      Fail(location, path, "has no value; give one or remove the line");
    } else if (IsMessage(field)) {
      ReadFields(value, path, *message.GetReflection()->MutableMessage(&message, &field));
    } else if (value.kind != YamlNode::Kind::kScalar) {
      Fail(location, path,
           absl::StrCat("a single value is expected, but ", Describe(value), " is given"));
    } else {
      SetScalar(location, path, field, value.scalar, value.quoted, message);
    }
  }

  // Whether `path` or a field around it is wrong already.
  bool IsReported(absl::string_view path) const {
    for (const std::string& failed : failed_) {
      if (path == failed || absl::StartsWith(path, failed + ".")) return true;
    }
    return false;
  }

  // Where `path` or the nearest field around it was given.
  std::string LocationOf(absl::string_view path) const {
    while (!path.empty()) {
      const auto found = locations_.find(std::string(path));
      if (found != locations_.end()) return found->second;
      const size_t dot = path.rfind('.');
      path = path.substr(0, dot == absl::string_view::npos ? 0 : dot);
    }
    return AtLine(1);
  }

  const std::string filename_;
  v1::JobSpec spec_;
  bool has_fields_ = false;
  std::vector<std::string> violations_;
  std::set<std::string> failed_;
  std::map<std::string, std::string> locations_;
};

void WriteFields(const Message& message, const std::string& indent, std::string& out) {
  const google::protobuf::Reflection& reflection = *message.GetReflection();
  const Descriptor& type = *message.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    UPIPE_CHECK(!field.is_repeated()) << field.full_name();
    if (!reflection.HasField(message, &field)) continue;
    if (!IsMessage(field)) {
      absl::StrAppend(&out, indent, field.name(), ": ", ScalarFieldText(message, field), "\n");
      continue;
    }
    const Message& child = reflection.GetMessage(message, &field);
    std::string fields;
    WriteFields(child, indent + "  ", fields);
    absl::StrAppend(&out, indent, field.name(), fields.empty() ? ": {}\n" : ":\n", fields);
  }
}

}  // namespace

absl::StatusOr<v1::JobSpec> ParseJobSpecYaml(absl::string_view text, absl::string_view filename,
                                             const std::vector<std::string>& overrides) {
  SpecReader reader(filename);
  reader.ReadFile(text);
  for (const std::string& override_text : overrides) reader.ReadOverride(override_text);
  const std::vector<std::string> violations = reader.Finish();
  if (!violations.empty()) return absl::InvalidArgumentError(absl::StrJoin(violations, "\n"));
  return reader.TakeSpec();
}

absl::StatusOr<v1::JobSpec> ReadJobSpecFile(const std::string& path,
                                            const std::vector<std::string>& overrides) {
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  std::string text(kMaxJobSpecBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.is_open() || file.bad()) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read the job file ", path));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  return ParseJobSpecYaml(text, path, overrides);
}

std::string JobSpecToYaml(const v1::JobSpec& spec) {
  std::string out;
  WriteFields(spec, "", out);
  return out;
}

}  // namespace upipe
