#include "worker/rpc/log_uploads.h"

#include <condition_variable>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "worker/launcher/line_file.h"
#include "worker/launcher/rank_log.h"

namespace upipe::worker {
namespace {

constexpr size_t kUploadsMax = 16;
constexpr int64_t kChunkBytes = 64 << 10;
constexpr auto kFollowPoll = std::chrono::milliseconds(100);

using ReadPiece = std::function<absl::StatusOr<LogPiece>(int64_t offset)>;

// Of metrics.jsonl and timeline.jsonl.
ReadPiece ReadLines(const std::string& path, const std::string& missing) {
  return [reader = std::make_shared<LineFileReader>(path), missing](int64_t offset) {
    absl::StatusOr<LogPiece> piece = reader->Read(offset, kChunkBytes);
    if (absl::IsNotFound(piece.status())) piece = absl::NotFoundError(missing);
    return piece;
  };
}

// How the asked file of the rank whose folder is `dir` is read.
ReadPiece ReaderOf(v1::RankFile file, const std::string& dir) {
  switch (file) {
    case v1::RANK_FILE_UNSPECIFIED:
    case v1::RANK_FILE_LOG:
      return [dir](int64_t offset) { return ReadRankLog(dir, offset, kChunkBytes); };
    case v1::RANK_FILE_STEPS:
      return ReadLines(dir + "/metrics.jsonl", "this worker holds no step record of that rank");
    case v1::RANK_FILE_TIMELINES:
      return ReadLines(dir + "/timeline.jsonl", "this worker holds no timeline of that rank");
    default:
      return [file](int64_t) -> absl::StatusOr<LogPiece> {
        return absl::InvalidArgumentError(
            absl::StrCat("a worker keeps no file of kind ", static_cast<int>(file)));
      };
  }
}

}  // namespace

struct LogUploads::Upload {
  v1::OpenLog request;
  std::string dir;
  std::string refusal;
  std::function<bool()> live;
  grpc::ClientContext context;
  std::mutex mutex;
  std::condition_variable stopped;
  bool stopping = false;
  std::atomic<bool> done{false};
  std::thread thread;

  // Waits for more output; true when the upload must end.
  bool WaitStopped() {
    std::unique_lock lock(mutex);
    return stopped.wait_for(lock, kFollowPoll, [this] { return stopping; });
  }
};

LogUploads::LogUploads(std::shared_ptr<grpc::Channel> channel)
    : stub_(v1::WorkerService::NewStub(std::move(channel))) {}

LogUploads::~LogUploads() {
  std::lock_guard lock(mutex_);
  for (Upload& upload : uploads_) {
    {
      std::lock_guard upload_lock(upload.mutex);
      upload.stopping = true;
    }
    upload.stopped.notify_all();
    upload.context.TryCancel();
  }
  for (Upload& upload : uploads_) upload.thread.join();
}

void LogUploads::Start(const v1::OpenLog& request, const std::string& dir,
                       std::function<bool()> live) {
  std::lock_guard lock(mutex_);
  for (auto it = uploads_.begin(); it != uploads_.end();) {
    if (!it->done) {
      ++it;
      continue;
    }
    it->thread.join();
    it = uploads_.erase(it);
  }
  const size_t running = uploads_.size();
  if (running >= 2 * kUploadsMax)
    return;  // even refusals are bounded; the coordinator's request times out
  Upload& upload = uploads_.emplace_back();
  upload.request = request;
  upload.dir = dir;
  upload.live = std::move(live);
  if (running >= kUploadsMax) {
    upload.refusal =
        absl::StrCat(kUploadsMax, " logs are being sent by this worker already; try again later");
  }
  upload.thread = std::thread([this, &upload] {
    Run(upload);
    upload.done = true;
  });
}

void LogUploads::Run(Upload& upload) {
  v1::UploadLogResponse response;
  const auto writer = stub_->UploadLog(&upload.context, &response);
  Send(upload, *writer);
  writer->WritesDone();
  writer->Finish();
}

void LogUploads::Send(Upload& upload, grpc::ClientWriterInterface<v1::LogChunk>& writer) {
  v1::LogChunk chunk;
  chunk.set_request_id(upload.request.request_id());
  if (!upload.refusal.empty()) {
    chunk.set_error(upload.refusal);
    writer.Write(chunk);
    return;
  }
  const ReadPiece read = ReaderOf(upload.request.file(), upload.dir);
  int64_t offset = upload.request.offset();
  bool announced = false;
  for (;;) {
    const bool live =
        upload.live();  // looked at before reading: what was written until then will be seen
    const absl::StatusOr<LogPiece> piece = read(offset);
    const bool may_come =
        upload.request.follow() && live && !absl::IsInvalidArgument(piece.status());
    if (!piece.ok() && !may_come) {
      chunk.set_error(std::string(piece.status().message()));
      chunk.set_not_found(absl::IsNotFound(piece.status()));
      writer.Write(chunk);
      return;
    }
    // The first chunk goes out even when empty: it tells the coordinator that the log is here.
    if (piece.ok() && (!announced || !piece->data.empty() || !piece->gap.empty())) {
      chunk.set_data(piece->data);
      chunk.set_offset(piece->offset);
      chunk.set_gap(piece->gap);
      if (!writer.Write(chunk)) return;
      announced = true;
      offset = piece->offset + static_cast<int64_t>(piece->data.size());
      continue;
    }
    if (!upload.request.follow() || !live) {
      chunk.clear_data();
      chunk.clear_gap();
      chunk.set_complete(true);
      writer.Write(chunk);
      return;
    }
    if (upload.WaitStopped()) return;
    if (piece.ok()) offset = piece->offset;  // a negative offset is resolved once
  }
}

}  // namespace upipe::worker
