#include "common/loopback.h"

#include <arpa/inet.h>

#include <string>

namespace upipe {

bool IsLoopback(absl::string_view listen) {
  const size_t colon = listen.rfind(':');
  const std::string host(listen.substr(0, colon));
  if (host == "localhost" || host == "[::1]") return true;
  in_addr address = {};
  return inet_pton(AF_INET, host.c_str(), &address) == 1 && (ntohl(address.s_addr) >> 24) == 127;
}

}  // namespace upipe
