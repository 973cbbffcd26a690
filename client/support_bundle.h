// `upipe support-bundle`: what somebody needs who was not there, in one archive of bounded size.
// Works with whatever answers, and says what is missing.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/commands.h"

namespace upipe::client {

struct BundleOptions {
  std::string path;         // of the archive; empty: upipe-support-<date and time>.tar.gz here
  std::string version;      // of this client
  std::string coordinator;  // its address, for the record
  // The metrics text behind a host:port.
  std::function<absl::StatusOr<std::string>(const std::string& address)> fetch_metrics;
  // Logs of daemons of this machine: name and path.
  std::vector<std::pair<std::string, std::string>> local_logs;
};

// The archive appears whole or not at all; a part that cannot be had is named in it and on `err`,
// and is no failure. In JSON {"file", "bytes", "files", "missing": [..]}.
int SupportBundle(Console& console, const BundleOptions& options);

// `text` without what nobody else should read: nonces (words of exactly 32 hex digits) and the
// values of passwords, tokens, secrets and keys.
std::string WithoutSecrets(absl::string_view text);

}  // namespace upipe::client
