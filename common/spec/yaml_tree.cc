#include "common/spec/yaml_tree.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/utf8.h"

namespace upipe {
namespace {

int LineOf(const YAML::Mark& mark) { return mark.line + 1; }

// The first byte sequence of `text` that no file needs; nothing when it is clean.
std::vector<YamlError> CheckCharacters(absl::string_view text) {
  int line = 1;
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    const auto first = static_cast<uint8_t>(text[0]);
    if (length == 0)
      return {{line, absl::StrFormat("byte 0x%02x is not part of UTF-8 text", first)}};
    if (first == '\t') return {{line, "contains a tab; indent and separate with spaces"}};
    if ((first < 0x20 && first != '\n' && first != '\r') || first == 0x7f) {
      return {{line, absl::StrFormat("contains the control character 0x%02x", first)}};
    }
    if (first == '\n') ++line;
    text.remove_prefix(length);
  }
  return {};
}

// Builds the tree of the first document from parser events.
class TreeBuilder : public YAML::EventHandler {
 public:
  TreeBuilder(absl::string_view noun, YamlNode& root) : noun_(noun), root_(root) {}

  std::vector<YamlError> TakeErrors() { return std::move(errors_); }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ == 2)
      errors_.push_back(
          {LineOf(mark), absl::StrCat("a second document begins; one file is one ", noun_)});
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override {
    Add({YamlNode::Kind::kNull, LineOf(mark), false, "", {}});
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    errors_.push_back({LineOf(mark), "aliases (*name) are not accepted; write the value out"});
    Add({YamlNode::Kind::kNull, LineOf(mark), false, "", {}});
  }
  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t,
                const std::string& value) override {
    CheckTag(mark, tag);
    Add({YamlNode::Kind::kScalar, LineOf(mark), tag == "!", value, {}});
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {
    CheckTag(mark, tag);
    Open({YamlNode::Kind::kSequence, LineOf(mark), false, "", {}});
  }
  void OnSequenceEnd() override { Close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {
    CheckTag(mark, tag);
    Open({YamlNode::Kind::kMap, LineOf(mark), false, "", {}});
  }
  void OnMapEnd() override { Close(); }

 private:
  void CheckTag(const YAML::Mark& mark, const std::string& tag) {
    if (tag.empty() || tag == "?" || tag == "!") return;
    errors_.push_back(
        {LineOf(mark), absl::StrCat("tags are not accepted: '", ToUtf8(tag, 80), "'")});
  }
  void Add(YamlNode node) {
    if (documents_ > 1) return;
    (open_.empty() ? root_ : open_.back().children.emplace_back()) = std::move(node);
  }
  void Open(YamlNode node) { open_.push_back(std::move(node)); }
  void Close() {
    YamlNode node = std::move(open_.back());
    open_.pop_back();
    Add(std::move(node));
  }

  const std::string noun_;
  YamlNode& root_;
  std::vector<YamlNode> open_;
  std::vector<YamlError> errors_;
  int documents_ = 0;
};

}  // namespace

std::vector<YamlError> ParseYamlTree(absl::string_view text, absl::string_view noun,
                                     YamlNode& root) {
  std::vector<YamlError> errors = CheckCharacters(text);
  if (!errors.empty()) return errors;
  root = YamlNode{.line = 1};
  TreeBuilder builder(noun, root);
  std::istringstream stream{std::string(text)};
  YamlError syntax;
  try {
    YAML::Parser parser(stream);
    // At most two: yaml-cpp 0.7 yields empty documents for ever at a stray "," or "]".
    if (parser.HandleNextDocument(builder)) parser.HandleNextDocument(builder);
  } catch (const YAML::Exception& error) {
    syntax = {error.mark.is_null() ? 1 : LineOf(error.mark),
              absl::StrCat("is no YAML: ", error.msg)};
  } catch (const std::exception& error) {
    syntax = {1, absl::StrCat("is no YAML: ", error.what())};
  }
  errors = builder.TakeErrors();
  if (!syntax.message.empty()) errors.push_back(std::move(syntax));
  return errors;
}

}  // namespace upipe
