#include "common/ids.h"

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstddef>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace upipe {
namespace {

template <size_t kBytes>
std::array<char, kBytes> RandomBytes() {
  std::array<char, kBytes> bytes;
  ssize_t got;
  do {
    got = getrandom(bytes.data(), bytes.size(), 0);  // up to 256 bytes never come in parts
  } while (got < 0 && errno == EINTR);
  UPIPE_CHECK(got == static_cast<ssize_t>(kBytes)) << "getrandom gave " << got << " bytes";
  return bytes;
}

}  // namespace

std::string RandomNonce() {
  const auto bytes = RandomBytes<16>();
  return absl::BytesToHexString(absl::string_view(bytes.data(), bytes.size()));
}

std::string NewJobId(absl::string_view name) {
  static constexpr absl::string_view kAlphabet = "abcdefghijklmnopqrstuvwxyz234567";
  std::string id = absl::StrCat(name, "-");
  for (const char byte : RandomBytes<6>()) id += kAlphabet[static_cast<unsigned char>(byte) % 32];
  return id;
}

}  // namespace upipe
