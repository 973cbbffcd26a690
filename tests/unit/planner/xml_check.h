// Whether a text is well-formed XML, as far as pictures need it: one root, elements that nest,
// attributes once and quoted, known entities.
#pragma once

#include <cctype>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace upipe {

// Empty, or what is wrong and where.
class XmlCheck {
 public:
  explicit XmlCheck(absl::string_view text) : rest_(text), size_(text.size()) {}

  std::string Run() {
    while (error_.empty() && !rest_.empty()) {
      if (rest_[0] == '<') {
        Element();
      } else {
        CharacterData(rest_.substr(0, rest_.find('<')));
      }
    }
    if (error_.empty() && !open_.empty()) Fail(absl::StrCat("<", open_.back(), "> stays open"));
    if (error_.empty() && roots_ != 1) Fail(absl::StrCat(roots_, " roots"));
    return error_;
  }

 private:
  void Fail(absl::string_view what) {
    if (error_.empty()) error_ = absl::StrCat(what, " at byte ", size_ - rest_.size());
  }

  void CharacterData(absl::string_view text) {
    if (open_.empty() && text.find_first_not_of(" \n") != text.npos) Fail("text outside the root");
    Entities(text);
    rest_.remove_prefix(text.size());
  }

  void Entities(absl::string_view text) {
    for (size_t i = 0; i < text.size(); ++i) {
      const auto c = static_cast<unsigned char>(text[i]);
      if (c < 0x20 && c != '\n' && c != '\t') Fail("a character that XML forbids");
      if (c != '&') continue;
      const absl::string_view entity = text.substr(i, text.find(';', i) - i + 1);
      static const std::set<absl::string_view> known = {"&amp;", "&lt;", "&gt;", "&quot;"};
      if (!known.contains(entity)) Fail("an unknown entity");
    }
  }

  std::string Name() {
    size_t end = 0;
    while (end < rest_.size() && (std::isalnum(static_cast<unsigned char>(rest_[end])) != 0 ||
                                  rest_[end] == '-' || rest_[end] == ':')) {
      ++end;
    }
    if (end == 0) Fail("a name is missing");
    const std::string name(rest_.substr(0, end));
    rest_.remove_prefix(end);
    return name;
  }

  bool Take(absl::string_view text) { return absl::ConsumePrefix(&rest_, text); }

  void Element() {
    if (Take("</")) {
      if (open_.empty() || Name() != open_.back() || !Take(">")) return Fail("a wrong end tag");
      open_.pop_back();
      return;
    }
    Take("<");
    const std::string name = Name();
    std::set<std::string> attributes;
    while (error_.empty()) {
      const bool spaced = Take(" ");
      while (Take(" ")) continue;
      if (Take("/>")) {
        if (open_.empty()) ++roots_;
        return;
      }
      if (Take(">")) {
        if (open_.empty()) ++roots_;
        open_.push_back(name);
        return;
      }
      if (!spaced) return Fail("attributes without a space between");
      if (!attributes.insert(Name()).second) return Fail("an attribute twice");
      if (!Take("=\"")) return Fail("an attribute without a quoted value");
      const absl::string_view value = rest_.substr(0, rest_.find('"'));
      if (value.find('<') != value.npos) return Fail("< in an attribute");
      Entities(value);
      rest_.remove_prefix(value.size());
      if (!Take("\"")) return Fail("an open quote");
    }
  }

  absl::string_view rest_;
  const size_t size_;
  std::vector<std::string> open_;
  int roots_ = 0;
  std::string error_;
};

inline std::string XmlFault(const std::string& text) { return XmlCheck(text).Run(); }

}  // namespace upipe
