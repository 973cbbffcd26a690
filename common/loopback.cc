#include "common/loopback.h"

#include <arpa/inet.h>

#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace upipe {

bool IsLoopback(absl::string_view listen) {
  const size_t colon = listen.rfind(':');
  const std::string host(listen.substr(0, colon));
  if (host == "localhost" || host == "[::1]") return true;
  in_addr address = {};
  return inet_pton(AF_INET, host.c_str(), &address) == 1 && (ntohl(address.s_addr) >> 24) == 127;
}

absl::Status CheckListen(absl::string_view listen, bool insecure_listen) {
  if (!IsLoopback(listen) && !insecure_listen) {
    return absl::FailedPreconditionError(
        absl::StrCat("plaintext is served on loopback only, not on ", listen,
                     "; listen on 127.0.0.1 or give --insecure-listen"));
  }
  int wanted = -1;  // gRPC would take 99999 for 34463
  const size_t colon = listen.rfind(':');
  if (colon == absl::string_view::npos || !absl::SimpleAtoi(listen.substr(colon + 1), &wanted) ||
      wanted < 0 || wanted > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen on ", listen, ": host:port is needed, port 0 to 65535"));
  }
  return absl::OkStatus();
}

}  // namespace upipe
