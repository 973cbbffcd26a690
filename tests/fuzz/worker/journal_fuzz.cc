// The journal a worker finds at its start: any bytes are read or refused, nothing in it may name
// what is no process of ours, and what was read is read again after the journal rewrote itself.
#include <algorithm>
#include <fstream>
#include <map>
#include <string>

#include "common/check.h"
#include "tests/support/fuzz/scratch_folder.h"
#include "worker/launcher/journal.h"

namespace upipe::worker {
namespace {

void CheckEntries(const Journal& journal) {
  for (const JournalEntry& entry : journal.entries()) {
    UPIPE_CHECK(entry.process.pid >= 0) << "a signal to " << entry.process.pid << " hits others";
    UPIPE_CHECK(entry.key.rank >= 0) << entry.key.rank;
  }
}

void Fuzz(const uint8_t* data, size_t size) {
  static const fuzz::ScratchFolder folder;
  std::ofstream(folder.path() + "/journal", std::ios::binary | std::ios::trunc)
      .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
  std::map<std::string, int64_t> generations;
  size_t entries = 0;
  {
    absl::StatusOr<Journal> journal = Journal::Open(folder.path());
    if (!journal.ok()) return;
    CheckEntries(*journal);
    generations = journal->generations();
    entries = journal->entries().size();
    UPIPE_CHECK_OK(journal->AppendStart({{"fresh", 0}, "job", 7, "", {}, ""}));
    UPIPE_CHECK_OK(journal->AppendGone({"fresh", 0}));
  }
  int64_t& generation = generations["job"];
  generation = std::max<int64_t>(generation, 7);
  {
    absl::StatusOr<Journal> again = Journal::Open(folder.path());
    UPIPE_CHECK_OK(again.status());
    UPIPE_CHECK(again->entries().size() == entries) << again->entries().size();
    UPIPE_CHECK(again->generations() == generations);
    UPIPE_CHECK_OK(again->Forget());
  }
  absl::StatusOr<Journal> emptied = Journal::Open(folder.path());
  UPIPE_CHECK_OK(emptied.status());
  UPIPE_CHECK(emptied->entries().empty() && emptied->generations() == generations);
}

}  // namespace
}  // namespace upipe::worker

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  upipe::worker::Fuzz(data, size);
  return 0;
}
