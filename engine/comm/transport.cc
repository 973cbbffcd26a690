#include "engine/comm/transport.h"

#include "absl/strings/str_cat.h"

namespace upipe::comm {

absl::Status UnexpectedMessage(int peer, uint32_t collective, uint32_t block, int64_t bytes) {
  return absl::InternalError(absl::StrCat(
      "rank ", peer, " sent block ", block, " of ", bytes, " bytes in collective ", collective,
      ", which this rank does not expect; the ranks run different "
      "schedules"));
}

}  // namespace upipe::comm
