#include "client/backup.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "client/new_file.h"
#include "client/report.h"
#include "common/errors/rpc_error.h"
#include "common/sha256.h"
#include "common/status.h"
#include "common/units.h"

namespace upipe::client {
namespace {

struct Copy {
  int64_t bytes = 0;
  int64_t revision = 0;
  std::string sha256;
};

absl::StatusOr<Copy> Fetch(Console& console, const std::string& path) {
  UPIPE_ASSIGN_OR_RETURN(NewFile file, NewFile::Create(path));
  Sha256 sum;
  v1::BackupResponse last;
  absl::Status written;
  const absl::Status read = console.coordinator.Backup([&](const v1::BackupResponse& piece) {
    sum.Update(piece.data());
    written = file.Write(piece.data());
    if (!piece.sha256().empty()) {
      last.set_revision(piece.revision());
      last.set_sha256(piece.sha256());
    }
    return written.ok();
  });
  UPIPE_RETURN_IF_ERROR(written);
  UPIPE_RETURN_IF_ERROR(read);
  const Copy copy{file.bytes(), last.revision(), sum.Hex()};
  if (last.sha256() != copy.sha256) {
    return RpcError(Reason::kBackupDamaged,
                    absl::StrCat("the copy that arrived, ", copy.bytes, " bytes with SHA-256 ",
                                 copy.sha256, ", is not the one the coordinator sent, ",
                                 last.sha256().empty() ? "which ended without a checksum"
                                                       : absl::StrCat("SHA-256 ", last.sha256()),
                                 "; nothing was written, try again"),
                    {{"file", path}});
  }
  UPIPE_RETURN_IF_ERROR(file.Commit());
  return copy;
}

}  // namespace

int Backup(Console& console, const std::string& path) {
  const absl::StatusOr<Copy> copy = Fetch(console, path);
  if (!copy.ok()) return Report(console, copy.status());
  if (console.json) {
    const nlohmann::ordered_json json = {{"file", path},
                                         {"bytes", copy->bytes},
                                         {"revision", copy->revision},
                                         {"sha256", copy->sha256}};
    console.out << json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  } else {
    console.out << path << "  " << FormatBytes(copy->bytes) << ", revision " << copy->revision
                << ", SHA-256 " << copy->sha256 << "\n";
  }
  return kExitDone;
}

}  // namespace upipe::client
