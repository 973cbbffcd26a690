// SHA-256 of bytes that come in pieces; what checkpoints and backups are compared by.
#pragma once

#include <memory>
#include <string>

#include "absl/strings/string_view.h"

namespace upipe {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;

  void Update(absl::string_view bytes);
  // 64 lower-case hex digits over all bytes so far. More may follow.
  std::string Hex() const;
  // The same as 32 bytes.
  std::string Digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Of one piece.
std::string Sha256Hex(absl::string_view bytes);

}  // namespace upipe
