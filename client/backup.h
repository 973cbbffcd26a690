// `upipe admin backup`: a consistent copy of the coordinator's store in one file, checked against
// the checksum the coordinator sends behind it. `upipe-coordinator --restore` takes it back.
#pragma once

#include <string>

#include "client/commands.h"

namespace upipe::client {

// The file appears whole or not at all. In JSON {"file", "bytes", "revision", "sha256"}.
int Backup(Console& console, const std::string& path);

}  // namespace upipe::client
