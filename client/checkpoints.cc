// `upipe checkpoints`: what the coordinator's record says of a job's checkpoints, and what lies in
// its folder where this machine reaches it. By names and sizes only; `upipe verify` reads them.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/commands.h"
#include "client/follow.h"
#include "client/render.h"
#include "client/report.h"
#include "common/units.h"

namespace upipe::client {
namespace {

namespace fs = std::filesystem;

// One folder PATH/<job>/g<generation>/s<step>.
struct Found {
  int64_t generation = 0;
  int64_t step = 0;
  std::string path;
  int64_t bytes = 0;  // of its shards
  int shards = 0;
  bool committed = false;  // its manifest is in its place
};

// "g12" -> 12 with letter 'g'; false for another name.
bool ReadNumber(const fs::path& path, char letter, int64_t& number) {
  const std::string name = path.filename().string();
  return name.size() > 1 && name[0] == letter && absl::SimpleAtoi(name.substr(1), &number) &&
         number >= 0;
}

std::vector<fs::path> EntriesOf(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    entries.push_back(it->path());
  }
  return entries;
}

Found Look(const fs::path& folder, int64_t generation, int64_t step) {
  Found found{generation, step, folder.string()};
  for (const fs::path& file : EntriesOf(folder)) {
    const std::string name = file.filename().string();
    if (name == "MANIFEST") found.committed = true;
    if (!absl::EndsWith(name, ".shard")) continue;
    std::error_code error;
    const auto bytes = fs::file_size(file, error);
    if (!error) found.bytes += static_cast<int64_t>(bytes);
    ++found.shards;
  }
  return found;
}

// Newest first.
std::vector<Found> FindIn(const fs::path& job_folder) {
  std::vector<Found> all;
  for (const fs::path& generation_folder : EntriesOf(job_folder)) {
    int64_t generation = 0, step = 0;
    if (!ReadNumber(generation_folder, 'g', generation)) continue;
    for (const fs::path& folder : EntriesOf(generation_folder)) {
      if (ReadNumber(folder, 's', step)) all.push_back(Look(folder, generation, step));
    }
  }
  std::sort(all.begin(), all.end(), [](const Found& a, const Found& b) {
    return std::pair(a.step, a.generation) > std::pair(b.step, b.generation);
  });
  return all;
}

bool Is(const v1::CheckpointRef& checkpoint, const Found& found) {
  return checkpoint.step() == found.step && checkpoint.generation() == found.generation;
}

std::string Standing(const v1::Job& job, const Found& found) {
  if (!found.committed) return "unfinished";
  if (job.has_last_commit() && Is(job.last_commit(), found)) return "committed, newest";
  return job.has_resume() && Is(job.resume(), found) ? "committed, gone on from" : "committed";
}

std::string Folder(const v1::Job& job) {
  return absl::StrCat(job.spec().checkpoint().path(), "/", job.id());
}

bool IsCheckpointEvent(const v1::JobEvent& event) {
  return absl::StartsWith(event.kind(), "CHECKPOINT");
}

void PrintRecord(const v1::Job& job, std::ostream& out) {
  out << job.id() << "  " << ShownState(job) << "  checkpoints below " << Printable(Folder(job))
      << "\n";
  if (job.has_last_commit()) {
    const v1::CheckpointRef& last = job.last_commit();
    out << "Last committed: " << CheckpointText(last) << ", written in "
        << FormatTimeSpan(absl::Seconds(last.write_seconds())) << "\n  content SHA-256 "
        << Printable(last.content_sha256()) << "\n";
  } else {
    out << "Last committed: none yet\n";
  }
  if (job.generation() > 0) {
    out << "Generation " << job.generation()
        << " went on from: " << (job.has_resume() ? CheckpointText(job.resume()) : "the beginning")
        << "\n";
  }
}

void PrintProblems(const v1::Job& job, std::ostream& out) {
  std::vector<std::vector<std::string>> rows = {{"TIME", "GENERATION", "EVENT", "MESSAGE"}};
  for (const v1::JobEvent& event : job.events()) {
    if (!IsCheckpointEvent(event)) continue;
    rows.push_back({TimeText(event.unix_millis()), absl::StrCat(event.generation()), event.kind(),
                    event.message()});
  }
  if (rows.size() > 1) out << "\n" << RenderTable(rows);
}

void PrintFolder(const v1::Job& job, const std::vector<Found>& all, std::ostream& out) {
  std::vector<std::vector<std::string>> rows = {
      {"STEP", "GENERATION", "STANDING", "SHARDS", "BYTES", "FOLDER"}};
  for (const Found& found : all) {
    rows.push_back({absl::StrCat(found.step), absl::StrCat(found.generation), Standing(job, found),
                    absl::StrCat(found.shards), FormatBytes(found.bytes), found.path});
  }
  out << "\n" << RenderTable(rows);
}

nlohmann::ordered_json ToJson(const v1::Job& job, const std::vector<Found>* all) {
  const auto reference = [](bool there, const v1::CheckpointRef& checkpoint) {
    return there ? nlohmann::ordered_json::parse(RenderJson(checkpoint)) : nlohmann::ordered_json();
  };
  nlohmann::ordered_json json = {
      {"job", job.id()},
      {"path", Folder(job)},
      {"last_commit", reference(job.has_last_commit(), job.last_commit())},
      {"resume", reference(job.has_resume(), job.resume())},
      {"problems", nlohmann::json::array()},
      {"folder", nullptr}};
  for (const v1::JobEvent& event : job.events()) {
    if (IsCheckpointEvent(event)) json["problems"].push_back(event.message());
  }
  if (all == nullptr) return json;
  json["folder"] = nlohmann::json::array();
  for (const Found& found : *all) {
    json["folder"].push_back({{"generation", found.generation},
                              {"step", found.step},
                              {"path", found.path},
                              {"committed", found.committed},
                              {"shards", found.shards},
                              {"bytes", found.bytes}});
  }
  return json;
}

}  // namespace

int Checkpoints(Console& console, const std::string& text) {
  const absl::StatusOr<std::string> id = ResolveJob(console, text);
  if (!id.ok()) return Report(console, id.status());
  const absl::StatusOr<v1::Job> job = console.coordinator.GetJob(*id);
  if (!job.ok()) return Report(console, job.status());
  const bool any = !job->spec().checkpoint().path().empty();
  std::error_code error;
  const bool here = any && fs::is_directory(Folder(*job), error);
  const std::vector<Found> all = here ? FindIn(Folder(*job)) : std::vector<Found>();
  if (console.json) {
    console.out << ToJson(*job, here ? &all : nullptr)
                       .dump(1, ' ', false, nlohmann::json::error_handler_t::replace)
                << "\n";
    return kExitDone;
  }
  if (!any) {
    console.out << *id << "  " << ShownState(*job)
                << "  writes no checkpoints: its file has no checkpoint.path\n";
    return kExitDone;
  }
  PrintRecord(*job, console.out);
  PrintProblems(*job, console.out);
  if (here) {
    PrintFolder(*job, all, console.out);
  } else {
    Note(console, "the folder is not reached from this machine: this is the coordinator's record");
  }
  return kExitDone;
}

}  // namespace upipe::client
