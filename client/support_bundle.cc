#include "client/support_bundle.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/http_get.h"
#include "client/new_file.h"
#include "client/render.h"
#include "client/report.h"
#include "client/tar_gzip.h"
#include "common/status.h"
#include "common/units.h"

namespace upipe::client {
namespace {

constexpr int64_t kMaxBundleBytes = 64 << 20;  // of all files, before compression
constexpr size_t kMaxFileBytes = 4 << 20;
constexpr int64_t kLogTailBytes = 256 << 10;
constexpr int kMaxListedJobs = 1000;
constexpr int kMaxDescribedJobs = 100;
constexpr int kMaxLogJobs = 20;
constexpr absl::Duration kMetricsLimit = absl::Seconds(60);  // of all endpoints together

constexpr char kReadme[] =
    R"(What is in this archive, and what is not.

  versions.txt       of the client, the coordinator and every worker
  configuration.txt  what the coordinator runs with, defaults filled in
  nodes.txt, .json   workers and their slots
  jobs.txt           the newest 1,000 jobs
  jobs/              jobs that failed or have not ended, at most 100: as `upipe describe` shows them
  metrics/           what the Prometheus endpoints answered
  logs/              the end of the first failing rank's log of the newest 20 failed jobs
  local/             the end of the logs of this machine's daemons
  missing.txt        what could not be had, and why

Left out: nonces of attempts, values of passwords, tokens, secrets and keys, environment, training
data. It does hold names of jobs, hosts and paths, and what trainers wrote to their logs.
)";

// Safe as one part of a path, whatever a peer called itself.
std::string FileName(absl::string_view name) {
  std::string safe(name.substr(0, 80));
  for (char& c : safe) {
    const bool kept =
        absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == '-';
    if (!kept) c = '_';
  }
  return safe.empty() || safe[0] == '.' ? absl::StrCat("_", safe) : safe;
}

bool IsWordCharacter(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_';
}

// The end of a file; an error in words.
absl::StatusOr<std::string> TailOfFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file.is_open()) return absl::NotFoundError(absl::StrCat("cannot read ", path));
  const int64_t size = file.tellg();
  file.seekg(std::max<int64_t>(0, size - kLogTailBytes));
  std::string text(static_cast<size_t>(std::min(size, kLogTailBytes)), '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

// Collects the parts of one bundle.
class Bundle {
 public:
  Bundle(Console& console, const BundleOptions& options, absl::Time now, NewFile& file)
      : console_(console),
        options_(options),
        now_(now),
        archive_(now, [&file](absl::string_view bytes) { return file.Write(bytes); }) {}

  absl::Status Fill() {
    UPIPE_RETURN_IF_ERROR(Add("README.txt", kReadme));
    UPIPE_RETURN_IF_ERROR(AddNodes());
    UPIPE_RETURN_IF_ERROR(AddJobs());
    for (const auto& [name, path] : options_.local_logs) {
      UPIPE_RETURN_IF_ERROR(
          AddOrMiss(absl::StrCat("local/", FileName(name), ".log"), TailOfFile(path)));
    }
    UPIPE_RETURN_IF_ERROR(
        Add("missing.txt", missing_.empty() ? "nothing\n" : absl::StrJoin(missing_, "\n") + "\n"));
    return archive_.Finish();
  }

  int files() const { return files_; }
  const std::vector<std::string>& missing() const { return missing_; }

 private:
  absl::Status Add(const std::string& path, absl::string_view content) {
    if (content.size() > kMaxFileBytes) {
      missing_.push_back(absl::StrCat(path, ": all but its last ", FormatBytes(kMaxFileBytes)));
      content.remove_prefix(content.size() - kMaxFileBytes);
    }
    if (bytes_ + static_cast<int64_t>(content.size()) > kMaxBundleBytes) {
      missing_.push_back(
          absl::StrCat(path, ": the archive holds ", FormatBytes(kMaxBundleBytes), " at most"));
      return absl::OkStatus();
    }
    const std::string text = WithoutSecrets(content);
    bytes_ += static_cast<int64_t>(text.size());
    ++files_;
    return archive_.Add(absl::StrCat("upipe-support/", path), text);
  }

  absl::Status AddOrMiss(const std::string& path, const absl::StatusOr<std::string>& content) {
    if (content.ok()) return Add(path, *content);
    missing_.push_back(absl::StrCat(path, ": ", Printable(content.status().message())));
    return absl::OkStatus();
  }

  absl::Status AddNodes() {
    const absl::StatusOr<v1::ListNodesResponse> nodes = console_.coordinator.ListNodes();
    std::string versions = absl::StrCat("client ", options_.version, "\ncoordinator ",
                                        nodes.ok() ? nodes->coordinator_version() : "unknown",
                                        " at ", options_.coordinator, "\n");
    if (!nodes.ok()) {
      reachable_ = false;
      missing_.push_back(
          absl::StrCat("everything the coordinator knows: ", Printable(nodes.status().message())));
      return Add("versions.txt", versions);
    }
    for (const v1::Node& node : nodes->nodes()) {
      absl::StrAppend(&versions, "worker ", node.worker(), " ", node.version(), "\n");
    }
    UPIPE_RETURN_IF_ERROR(Add("versions.txt", versions));
    UPIPE_RETURN_IF_ERROR(
        Add("configuration.txt", absl::StrJoin(nodes->coordinator_configuration(), "\n") + "\n"));
    UPIPE_RETURN_IF_ERROR(Add("nodes.txt", RenderNodes(*nodes)));
    UPIPE_RETURN_IF_ERROR(Add("nodes.json", RenderJson(*nodes)));
    return AddMetrics(*nodes);
  }

  absl::Status AddMetrics(const v1::ListNodesResponse& nodes) {
    const BootTime end = console_.clock.Now() + kMetricsLimit;
    const auto fetch = [&](const std::string& name, const std::string& address) {
      const std::string path = absl::StrCat("metrics/", FileName(name), ".txt");
      if (address.empty()) return AddOrMiss(path, absl::NotFoundError("its address is not known"));
      if (console_.clock.Now() >= end) {
        return AddOrMiss(
            path, absl::DeadlineExceededError(absl::StrCat(
                      "not asked: the endpoints before it took ", FormatTimeSpan(kMetricsLimit))));
      }
      return AddOrMiss(path, options_.fetch_metrics(address));
    };
    UPIPE_RETURN_IF_ERROR(fetch("coordinator", nodes.coordinator_metrics_address()));
    for (const v1::Node& node : nodes.nodes()) {
      UPIPE_RETURN_IF_ERROR(fetch(absl::StrCat("worker-", node.worker()), node.metrics_address()));
    }
    return absl::OkStatus();
  }

  absl::Status AddJobs() {
    if (!reachable_) return absl::OkStatus();
    v1::ListJobsRequest request;
    request.set_page_size(kMaxListedJobs);
    std::vector<v1::Job> jobs;
    do {
      const absl::StatusOr<v1::ListJobsResponse> page = console_.coordinator.ListJobs(request);
      if (!page.ok()) return AddOrMiss("jobs.txt", page.status());
      jobs.insert(jobs.end(), page->jobs().begin(), page->jobs().end());
      request.set_page_token(page->next_page_token());
    } while (!request.page_token().empty() && jobs.size() < kMaxListedJobs);
    UPIPE_RETURN_IF_ERROR(Add("jobs.txt", RenderJobs(jobs, now_)));
    int described = 0, logs = 0;
    for (const v1::Job& job : jobs) {
      const bool failed = job.state() == v1::JOB_STATE_FAILED;
      if ((IsTerminal(job.state()) && !failed) || described == kMaxDescribedJobs) continue;
      ++described;
      UPIPE_RETURN_IF_ERROR(AddJob(job.id()));
      if (!failed || job.generation() == 0 || logs++ >= kMaxLogJobs) continue;
      UPIPE_RETURN_IF_ERROR(AddLog(job));
    }
    return absl::OkStatus();
  }

  absl::Status AddJob(const std::string& id) {
    const std::string path = absl::StrCat("jobs/", FileName(id));
    const absl::StatusOr<v1::Job> job = console_.coordinator.GetJob(id);
    if (!job.ok()) return AddOrMiss(path, job.status());
    UPIPE_RETURN_IF_ERROR(Add(path + ".txt", RenderJob(*job, now_)));
    return Add(path + ".json", RenderJson(*job));
  }

  // The end of the log of the rank that failed first.
  absl::Status AddLog(const v1::Job& job) {
    v1::LogsRequest request;
    request.set_id(job.id());
    request.set_rank(job.cause().rank());
    request.set_offset(-kLogTailBytes);
    std::string text;
    const absl::Status read =
        console_.coordinator.Logs(request, [&](const v1::LogsResponse& message) {
          text += message.data();
          return text.size() < kMaxFileBytes;
        });
    const std::string path = absl::StrCat("logs/", FileName(job.id()), "-g", job.generation(), "-r",
                                          request.rank(), ".log");
    if (!read.ok()) return AddOrMiss(path, read);
    return Add(path, text);
  }

  Console& console_;
  const BundleOptions& options_;
  const absl::Time now_;
  TarGzip archive_;
  bool reachable_ = true;
  int64_t bytes_ = 0;
  int files_ = 0;
  std::vector<std::string> missing_;
};

// Where the value begins that must not be told: after "token=" or "password: "; npos without one.
size_t SecretValueAt(absl::string_view line) {
  const std::string lower = absl::AsciiStrToLower(line);
  for (const char* word : {"password", "passwd", "secret", "token", "api_key", "apikey",
                           "private_key", "authorization"}) {
    for (size_t at = lower.find(word); at != std::string::npos; at = lower.find(word, at + 1)) {
      size_t value = at + absl::string_view(word).size();
      while (value < lower.size() && (lower[value] == ' ' || lower[value] == '"')) ++value;
      if (value >= lower.size() || (lower[value] != '=' && lower[value] != ':')) continue;
      if (value + 1 < lower.size()) return value + 1;
    }
  }
  return std::string::npos;
}

// Words of exactly 32 hex digits replaced.
std::string WithoutNonces(absl::string_view line) {
  std::string out;
  for (size_t i = 0; i < line.size();) {
    size_t end = i;
    while (end < line.size() && IsWordCharacter(line[end])) ++end;
    const absl::string_view word = line.substr(i, std::max<size_t>(end - i, 1));
    const bool nonce = word.size() == 32 && std::all_of(word.begin(), word.end(), [](char c) {
                         return absl::ascii_isxdigit(static_cast<unsigned char>(c));
                       });
    absl::StrAppend(&out, nonce ? absl::string_view("[left out]") : word);
    i += word.size();
  }
  return out;
}

}  // namespace

std::string WithoutSecrets(absl::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    const absl::string_view line = text.substr(0, end);
    const size_t secret = SecretValueAt(line);
    if (secret != std::string::npos) {
      absl::StrAppend(&out, WithoutNonces(line.substr(0, secret)), " [left out]");
    } else {
      out += WithoutNonces(line);
    }
    if (end < text.size()) out += '\n';
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

int SupportBundle(Console& console, const BundleOptions& options) {
  const absl::Time now = absl::FromUnixMillis(console.clock.UnixMillis());
  const std::string path =
      !options.path.empty()
          ? options.path
          : absl::StrCat("upipe-support-",
                         absl::FormatTime("%Y%m%d-%H%M%S", now, absl::LocalTimeZone()), ".tar.gz");
  absl::StatusOr<NewFile> file = NewFile::Create(path);
  if (!file.ok()) return Report(console, file.status());
  Bundle bundle(console, options, now, *file);
  absl::Status written = bundle.Fill();
  if (written.ok()) written = file->Commit();
  if (!written.ok()) return Report(console, written);
  if (console.json) {
    const nlohmann::ordered_json json = {{"file", path},
                                         {"bytes", file->bytes()},
                                         {"files", bundle.files()},
                                         {"missing", bundle.missing()}};
    console.out << json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
    return kExitDone;
  }
  for (const std::string& missing : bundle.missing()) Note(console, "missing: " + missing);
  console.out << path << "  " << FormatBytes(file->bytes()) << ", " << bundle.files()
              << " files; look through it before you pass it on\n";
  return kExitDone;
}

}  // namespace upipe::client
