#include "common/spec/yaml_spec.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/check.h"
#include "common/spec/hf_config.h"
#include "common/spec/job_spec.h"
#include "common/spec/model_rules.h"
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

constexpr int kOverride = std::numeric_limits<int>::max();  // in place of a line: from `--set`

// Fills one JobSpec from a tree and overrides, collecting what is wrong and on which line each
// field was given.
class SpecReader {
 public:
  explicit SpecReader(absl::string_view filename) : filename_(filename) {}

  void ReadFile(absl::string_view text) {
    if (text.size() > kMaxJobSpecBytes) {
      Fail(1, "",
           absl::StrCat("has ", text.size(), " bytes; a job file has at most ", kMaxJobSpecBytes));
      return;
    }
    YamlNode root;
    for (const YamlError& error : ParseYamlTree(text, root)) Fail(error.line, "", error.message);
    has_fields_ = errors_.empty() && root.kind == YamlNode::Kind::kMap;
    if (errors_.empty()) ReadFields(root, "", spec_);
  }

  void ReadOverride(absl::string_view text) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(text, absl::MaxSplits('=', 1));
    const std::string clean = ToUtf8(text, text.size());
    if (clean != text) {
      Fail(kOverride, "", absl::StrCat("'", clean, "' has bytes that are not part of UTF-8 text"));
      return;
    }
    if (!absl::StrContains(text, '=')) {
      Fail(kOverride, "",
           absl::StrCat("'", ToUtf8(text, 80), "' has no '='; write path=value, e.g. ",
                        "train.steps=100"));
      return;
    }
    const bool unset = parts.second.empty();
    Message* message = &spec_;
    std::string path;
    std::function<void()> restore;  // a section that only the walk made
    const std::vector<std::string> names = absl::StrSplit(parts.first, '.');
    for (size_t i = 0; i < names.size(); ++i) {
      const FieldDescriptor* field = FindField(*message->GetDescriptor(), names[i]);
      if (field == nullptr) {
        FailUnknown(kOverride, path, names[i], *message->GetDescriptor());
        return;
      }
      path = Join(path, names[i]);
      const bool last = i + 1 == names.size();
      const auto clear = [message, field] { message->GetReflection()->ClearField(message, field); };
      if (last && unset) {
        lines_[path] = kOverride;
        clear();
      } else if (IsMessage(*field) == last) {
        Fail(kOverride, path,
             last ? "has fields of its own; name one of them, separated by '.'"
                  : "is a single value without fields");
        return;
      } else if (last) {
        SetScalar(kOverride, path, *field, parts.second, false, *message);
      } else {
        if (unset && !restore && !message->GetReflection()->HasField(*message, field))
          restore = clear;
        message = message->GetReflection()->MutableMessage(message, field);
      }
    }
    if (restore) restore();
  }

  // Replaces model.hf_config by what the file says, below the fields that are given.
  void ReadModelFile(const TextReader& read_text) {
    const v1::ModelSpec& model = spec_.model();
    if (model.hf_config().empty() || read_text == nullptr) return;
    const std::string path = "model.hf_config";
    const int line = LineOf(path);
    if (!model.preset().empty()) {
      Fail(line, path, absl::StrCat("is given beside model.preset ", model.preset(), "; keep one"));
      return;
    }
    const absl::StatusOr<std::string> text = read_text(model.hf_config());
    if (!text.ok()) {
      Fail(line, path, text.status().message());
      return;
    }
    v1::ModelSpec described;
    const std::vector<Violation> violations = ReadHfConfig(*text, described);
    for (const Violation& violation : violations) {
      Fail(line, path,
           absl::StrCat(model.hf_config(), violation.field.empty() ? "" : ": ", violation.field,
                        violation.field.empty() ? " " : ": ", violation.message));
    }
    if (!violations.empty()) return;
    v1::ModelSpec full = LaidOver(described, model);
    full.clear_hf_config();
    *spec_.mutable_model() = std::move(full);
  }

  // Everything wrong with the text and with the values it gave, by line, overrides last. A field
  // already reported is not reported again, and a text that is no set of fields is not also told
  // which ones it lacks.
  std::vector<std::string> Finish() {
    if (has_fields_) {
      for (const Violation& violation : ValidateJobSpec(spec_)) {
        if (!IsReported(violation.field)) {
          Fail(LineOf(violation.field), violation.field, violation.message);
        }
      }
    }
    std::stable_sort(errors_.begin(), errors_.end(),
                     [](const Error& a, const Error& b) { return a.line < b.line; });
    std::vector<std::string> texts;
    for (Error& error : errors_) texts.push_back(std::move(error.text));
    return texts;
  }

  v1::JobSpec TakeSpec() { return std::move(spec_); }

 private:
  struct Error {
    int line = 0;
    std::string text;
  };

  void Fail(int line, absl::string_view path, absl::string_view message) {
    const std::string place =
        line == kOverride ? std::string("--set") : absl::StrCat(filename_, ":", line);
    errors_.push_back({line, absl::StrCat(place, ": ", path, path.empty() ? "" : ": ", message)});
    failed_.insert(std::string(path));
  }

  void FailUnknown(int line, absl::string_view path, absl::string_view name,
                   const Descriptor& type) {
    Fail(line, Join(path, ToUtf8(name, 80)),
         absl::StrCat("unknown field", NearestName(name, FieldNames(type))));
  }

  void SetScalar(int line, const std::string& path, const FieldDescriptor& field,
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

  void ReadFields(const YamlNode& node, const std::string& path, Message& message) {
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
      const FieldDescriptor* field = FindField(*message.GetDescriptor(), key.scalar);
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

  void ReadField(const FieldDescriptor& field, const YamlNode& key, const YamlNode& value,
                 const std::string& parent_path, Message& message) {
    const std::string path = Join(parent_path, field.name());
    lines_[path] = key.line;
    if (value.kind == YamlNode::Kind::kNull) {
      Fail(key.line, path, "has no value; give one or remove the line");
    } else if (IsMessage(field)) {
      ReadFields(value, path, *message.GetReflection()->MutableMessage(&message, &field));
    } else if (value.kind != YamlNode::Kind::kScalar) {
      Fail(key.line, path,
           absl::StrCat("a single value is expected, but ", Describe(value), " is given"));
    } else {
      SetScalar(key.line, path, field, value.scalar, value.quoted, message);
    }
  }

  // Whether `path` or a field around it is wrong already.
  bool IsReported(absl::string_view path) const {
    for (const std::string& failed : failed_) {
      if (path == failed || absl::StartsWith(path, failed + ".")) return true;
    }
    return false;
  }

  // The line where `path`, or the nearest field around it, was given; a model's field that is not
  // written came from its preset or file.
  int LineOf(absl::string_view path) const {
    while (!path.empty()) {
      std::vector<std::string> places = {std::string(path)};
      if (path == "model") places = {"model.preset", "model.hf_config", "model"};
      for (const std::string& place : places) {
        const auto found = lines_.find(place);
        if (found != lines_.end()) return found->second;
      }
      const size_t dot = path.rfind('.');
      path = path.substr(0, dot == absl::string_view::npos ? 0 : dot);
    }
    return 1;
  }

  const std::string filename_;
  v1::JobSpec spec_;
  bool has_fields_ = false;
  std::vector<Error> errors_;
  std::set<std::string> failed_;
  std::map<std::string, int> lines_;
};

// The first `bytes_max` + 1 bytes of a file, so that the caller sees that it has more.
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
                                             const std::vector<std::string>& overrides,
                                             const TextReader& read_text) {
  SpecReader reader(filename);
  reader.ReadFile(text);
  for (const std::string& override_text : overrides) reader.ReadOverride(override_text);
  reader.ReadModelFile(read_text);
  const std::vector<std::string> violations = reader.Finish();
  if (!violations.empty()) return absl::InvalidArgumentError(absl::StrJoin(violations, "\n"));
  return reader.TakeSpec();
}

absl::StatusOr<v1::JobSpec> ReadJobSpecFile(const std::string& path,
                                            const std::vector<std::string>& overrides) {
  UPIPE_ASSIGN_OR_RETURN(const std::string text,
                         ReadTextFile(path, kMaxJobSpecBytes, "the job file "));
  return ParseJobSpecYaml(text, path, overrides, [&](const std::string& named) {
    const std::filesystem::path file = std::filesystem::path(path).parent_path() / named;
    return ReadTextFile(file.string(), kMaxHfConfigBytes, "");
  });
}

std::string JobSpecToYaml(const v1::JobSpec& spec) {
  std::string out;
  WriteFields(spec, "", out);
  return out;
}

}  // namespace upipe
