#include "common/sha256.h"

#include <openssl/evp.h>

#include "absl/strings/escaping.h"
#include "common/check.h"

namespace upipe {

struct Sha256::State {
  State() : context(EVP_MD_CTX_new()) {
    UPIPE_CHECK(context != nullptr && EVP_DigestInit_ex(context, EVP_sha256(), nullptr) == 1);
  }
  ~State() { EVP_MD_CTX_free(context); }
  EVP_MD_CTX* context;
};

Sha256::Sha256() : state_(std::make_unique<State>()) {}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::Update(absl::string_view bytes) {
  UPIPE_CHECK(EVP_DigestUpdate(state_->context, bytes.data(), bytes.size()) == 1);
}

std::string Sha256::Hex() const { return absl::BytesToHexString(Digest()); }

std::string Sha256::Digest() const {
  State copy;
  UPIPE_CHECK(EVP_MD_CTX_copy_ex(copy.context, state_->context) == 1);
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  UPIPE_CHECK(EVP_DigestFinal_ex(copy.context, digest, &size) == 1);
  return std::string(reinterpret_cast<const char*>(digest), size);
}

std::string Sha256Hex(absl::string_view bytes) {
  Sha256 sum;
  sum.Update(bytes);
  return sum.Hex();
}

}  // namespace upipe
