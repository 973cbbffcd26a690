// Strict YAML to a protobuf message and back: the one walk over descriptors, so every field is
// reachable by its own name and nothing else is accepted. Repeated fields are lists. What a message
// must hold beyond its types is for whoever reads it.
#pragma once

#include <google/protobuf/message.h>

#include <cstddef>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/spec/violation.h"
#include "common/spec/yaml_tree.h"

namespace upipe {

// Fills one message from a text and overrides of single fields, collecting what is wrong and on
// which line each field was given. Paths are "train.steps" and "rates[2].length".
class YamlMessageReader {
 public:
  // In place of a line: from the command line.
  static constexpr int kOverride = std::numeric_limits<int>::max();
  // Which fields the unwritten fields of a section come from: their lines are told instead of its.
  using Origins = std::map<std::string, std::vector<std::string>>;

  // `noun` says in messages what one file is: "job". `message` is borrowed.
  YamlMessageReader(absl::string_view filename, absl::string_view noun,
                    google::protobuf::Message& message, Origins origins = {});

  // Reads a whole file; of one with more than `bytes_max` bytes nothing.
  void ReadText(absl::string_view text, size_t bytes_max);
  // Sets the single value at `path`; an empty `value` unsets the field or section.
  void Override(absl::string_view path, absl::string_view value);

  // `line` may be kOverride; an empty path is the whole text.
  void Fail(int line, absl::string_view path, absl::string_view message);
  // What a check of the message found, each on the line of its field. A field already reported is
  // not reported again, and a text that is no set of fields is not also told which ones it lacks.
  void FailAll(const std::vector<Violation>& violations);
  // The line where `path`, or the nearest field around it, was given; 1 when none was.
  int LineOf(absl::string_view path) const;

  // InvalidArgument with everything that failed, a line each, in the order of lines, overrides
  // last:
  //   <filename>:<line>: <field path>: <what is wrong>
  //   --set: <field path>: <what is wrong>
  absl::Status status() const;

 private:
  struct Error {
    int line = 0;
    std::string text;
  };

  void FailUnknown(int line, absl::string_view path, absl::string_view name,
                   const google::protobuf::Descriptor& type);
  void SetScalar(int line, const std::string& path, const google::protobuf::FieldDescriptor& field,
                 absl::string_view text, bool quoted, google::protobuf::Message& message);
  void ReadFields(const YamlNode& node, const std::string& path,
                  google::protobuf::Message& message);
  void ReadField(const google::protobuf::FieldDescriptor& field, const YamlNode& key,
                 const YamlNode& value, const std::string& parent_path,
                 google::protobuf::Message& message);
  void ReadList(const google::protobuf::FieldDescriptor& field, const YamlNode& key,
                const YamlNode& value, const std::string& path, google::protobuf::Message& message);
  bool IsReported(absl::string_view path) const;

  const std::string filename_;
  const std::string noun_;
  const Origins origins_;
  google::protobuf::Message& message_;
  bool has_fields_ = false;
  std::vector<Error> errors_;
  std::set<std::string> failed_;
  std::map<std::string, int> lines_;
};

// The fields that are set, in the form YamlMessageReader reads back to an equal message.
std::string MessageToYaml(const google::protobuf::Message& message);

// The first `bytes_max` + 1 bytes of a file, so that the caller sees that it has more. `what`, with
// a space behind it, says in the message what could not be read.
absl::StatusOr<std::string> ReadTextFile(const std::string& path, size_t bytes_max,
                                         absl::string_view what);

}  // namespace upipe
