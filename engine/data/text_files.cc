#include "engine/data/text_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/status.h"

namespace upipe::data {
namespace {

namespace fs = std::filesystem;

constexpr size_t kInvalidPercentMax = 10;
constexpr size_t kReadBytes = 1 << 18;

bool IsContinuation(uint8_t byte) { return (byte & 0xc0) == 0x80; }

// Bytes of the sequence that `lead` starts, 0 if none can (RFC 3629).
size_t SequenceBytes(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead <= 0xdf) return 2;
  if (lead >= 0xe0 && lead <= 0xef) return 3;
  if (lead >= 0xf0 && lead <= 0xf4) return 4;
  return 0;
}

// Excludes overlong forms, surrogates and code points above U+10FFFF, which the second byte tells.
bool SecondByteFits(uint8_t lead, uint8_t second) {
  if (lead == 0xe0) return second >= 0xa0;
  if (lead == 0xed) return second < 0xa0;
  if (lead == 0xf0) return second >= 0x90;
  if (lead == 0xf4) return second < 0x90;
  return true;
}

// Bytes outside well-formed UTF-8, without a sequence that the end cuts off.
size_t CountInvalidUtf8(absl::string_view text) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  size_t invalid = 0;
  size_t i = 0;
  while (i < text.size()) {
    uint64_t eight;
    if (text.size() - i >= sizeof(eight)) {
      std::memcpy(&eight, bytes + i, sizeof(eight));
      if ((eight & 0x8080808080808080u) == 0) {
        i += sizeof(eight);
        continue;
      }
    }
    const size_t length = SequenceBytes(bytes[i]);
    const size_t end = std::min(i + length, text.size());
    bool valid = length > 0;
    for (size_t j = i + 1; j < end && valid; ++j) {
      valid = IsContinuation(bytes[j]) && (j > i + 1 || SecondByteFits(bytes[i], bytes[j]));
    }
    if (!valid) ++invalid;
    i = valid ? end : i + 1;
  }
  return invalid;
}

absl::Status ReadError(int error, absl::string_view path) {
  return absl::ErrnoToStatus(error, absl::StrCat("cannot read ", path));
}

// The first `max_bytes` of a regular file.
absl::StatusOr<std::string> ReadFile(const std::string& path, size_t max_bytes) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return ReadError(errno, path);
  absl::Cleanup close_file = [fd] { close(fd); };
  std::string text;
  while (text.size() < max_bytes) {
    const size_t old_size = text.size();
    const size_t want = std::min(kReadBytes, max_bytes - old_size);
    text.resize(old_size + want);
    const ssize_t got = read(fd, text.data() + old_size, want);
    if (got < 0 && errno != EINTR) return ReadError(errno, path);
    text.resize(old_size + std::max<ssize_t>(got, 0));
    if (got == 0) break;
  }
  text.shrink_to_fit();
  return text;
}

// The state of one CollectTexts call.
class Collector {
 public:
  explicit Collector(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // A path the user named.
  absl::Status AddInput(const std::string& input) {
    struct stat info;
    if (stat(input.c_str(), &info) != 0) return ReadError(errno, input);
    if (S_ISDIR(info.st_mode)) return AddFolder(input, "");
    if (!S_ISREG(info.st_mode)) {
      return absl::InvalidArgumentError(
          absl::StrCat(input, " is neither a regular file nor a folder"));
    }
    UPIPE_ASSIGN_OR_RETURN(std::string text, ReadFile(input, max_bytes_ - found_.bytes));
    if (text.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(input, " is empty (0 bytes)"));
    }
    UPIPE_RETURN_IF_ERROR(CheckIsText(text, input));
    if (IsFirstSight(info)) Keep(fs::path(input).filename(), std::move(text));
    return absl::OkStatus();
  }

  bool full() const { return found_.bytes >= max_bytes_; }
  TextCollection& found() { return found_; }

 private:
  // `prefix` is the folder's own relative path with a slash behind it, empty for a named folder.
  absl::Status AddFolder(const std::string& folder, const std::string& prefix) {
    std::vector<std::string> names;
    std::error_code error;
    fs::directory_iterator entry(folder, error);
    for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
      names.push_back(entry->path().filename());
    }
    if (error) return ReadError(error.value(), folder);
    std::sort(names.begin(), names.end());
    for (const std::string& name : names) {
      if (full()) break;
      UPIPE_RETURN_IF_ERROR(AddEntry(absl::StrCat(folder, "/", name), absl::StrCat(prefix, name)));
    }
    return absl::OkStatus();
  }

  // Something met inside a folder.
  absl::Status AddEntry(const std::string& path, const std::string& relative_path) {
    struct stat info;
    if (lstat(path.c_str(), &info) != 0) return ReadError(errno, path);
    if (S_ISDIR(info.st_mode)) return AddFolder(path, absl::StrCat(relative_path, "/"));
    if (!S_ISREG(info.st_mode)) {
      ++found_.skipped_special;
      return absl::OkStatus();
    }
    UPIPE_ASSIGN_OR_RETURN(std::string text, ReadFile(path, max_bytes_ - found_.bytes));
    if (text.empty()) {
      ++found_.skipped_empty;
    } else if (!CheckIsText(text, path).ok()) {
      ++found_.skipped_binary;
    } else if (IsFirstSight(info)) {
      Keep(relative_path, std::move(text));
    }
    return absl::OkStatus();
  }

  bool IsFirstSight(const struct stat& info) {
    const bool first = seen_.emplace(info.st_dev, info.st_ino).second;
    if (!first) ++found_.skipped_duplicate;
    return first;
  }

  void Keep(std::string relative_path, std::string text) {
    found_.bytes += static_cast<int64_t>(text.size());
    found_.documents.push_back({std::move(relative_path), std::move(text)});
  }

  int64_t max_bytes_;
  std::set<std::pair<dev_t, ino_t>> seen_;
  TextCollection found_;
};

}  // namespace

absl::Status CheckIsText(absl::string_view bytes, absl::string_view name) {
  if (const size_t nul = bytes.find('\0'); nul != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is not text: byte %u of it is NUL", name, nul));
  }
  const size_t invalid = CountInvalidUtf8(bytes);
  if (invalid * 100 > bytes.size() * kInvalidPercentMax) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is not text: %u of %u bytes are not UTF-8, more than %u %%", name,
                        invalid, bytes.size(), kInvalidPercentMax));
  }
  return absl::OkStatus();
}

absl::StatusOr<TextCollection> CollectTexts(const std::vector<std::string>& inputs,
                                            int64_t max_bytes) {
  Collector collector(max_bytes);
  for (const std::string& input : inputs) {
    if (collector.full()) break;
    UPIPE_RETURN_IF_ERROR(collector.AddInput(input));
  }
  TextCollection& found = collector.found();
  found.reached_max_bytes = collector.full();
  if (found.documents.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s holds 0 text files (skipped: %d binary, %d empty, %d links and special files)",
        absl::StrJoin(inputs, ", "), found.skipped_binary, found.skipped_empty,
        found.skipped_special));
  }
  return std::move(found);
}

}  // namespace upipe::data
