#include "tests/e2e/coordinator/fake_worker.h"

#include <chrono>

#include "absl/strings/str_cat.h"

namespace upipe::coordinator {

FakeWorker::FakeWorker(Options options) : options_(std::move(options)) {
  channel_ = grpc::CreateChannel(options_.address, grpc::InsecureChannelCredentials());
  stub_ = v1::WorkerService::NewStub(channel_);
  context_.set_wait_for_ready(true);
  stream_ = stub_->Session(&context_);
  v1::WorkerMessage message;
  v1::Hello& hello = *message.mutable_hello();
  hello.set_worker(options_.name);
  hello.set_node_id(options_.name);
  hello.set_incarnation(options_.incarnation);
  hello.set_state_id(options_.incarnation);
  hello.set_start_number(1);
  hello.set_session_number(1);
  hello.set_num_slots(options_.slots);
  hello.set_memory_per_rank_bytes(options_.memory_per_rank_bytes);
  {
    std::lock_guard lock(mutex_);
    Send(std::move(message));
  }
  reader_ = std::thread([this] { Read(); });
  heart_ = std::thread([this] { Beat(); });
}

FakeWorker::~FakeWorker() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  end_.notify_all();
  context_.TryCancel();
  reader_.join();
  heart_.join();
  for (Followed& upload : followed_) {
    upload.context.TryCancel();
    upload.writer->Finish();
  }
}

void FakeWorker::Beat() {
  std::unique_lock lock(mutex_);
  while (!end_.wait_for(lock, std::chrono::milliseconds(100), [this] { return ending_; })) {
    v1::WorkerMessage message;
    message.mutable_heartbeat();
    Send(std::move(message));
  }
}

int64_t FakeWorker::epoch() const {
  std::lock_guard lock(mutex_);
  return epoch_;
}

int64_t FakeWorker::generation() const {
  std::lock_guard lock(mutex_);
  return generation_;
}

std::optional<absl::Duration> FakeWorker::stop_grace() const {
  std::lock_guard lock(mutex_);
  return stop_grace_;
}

void FakeWorker::Commit(int64_t step) {
  std::lock_guard lock(mutex_);
  v1::RankReport& rank = ranks_.at(0);
  v1::CheckpointRef& commit = *rank.mutable_last_commit();
  commit.set_generation(rank.ref().fence().generation());
  commit.set_step(step);
  commit.set_manifest_sha256(std::string(64, 'a'));
  commit.set_bytes(1000);
  Report(rank, rank.state());
}

int FakeWorker::num_live() const {
  std::lock_guard lock(mutex_);
  int live = 0;
  for (const auto& [rank, report] : ranks_) live += report.state() < v1::RANK_STATE_EXITED ? 1 : 0;
  return live;
}

void FakeWorker::Send(v1::WorkerMessage message) {
  message.set_sequence(++sequence_);
  stream_->Write(message);
}

void FakeWorker::Report(v1::RankReport& rank, v1::RankState state) {
  rank.set_state(state);
  v1::WorkerMessage message;
  *message.mutable_rank() = rank;
  Send(std::move(message));
}

void FakeWorker::EndRank(int number, int exit_code) {
  std::lock_guard lock(mutex_);
  v1::RankReport& rank = ranks_.at(number);
  rank.set_exit_code(exit_code);
  if (exit_code != 0) {
    rank.mutable_cause()->set_kind(v1::CAUSE_KIND_EXIT_CODE);
    rank.mutable_cause()->set_message(
        absl::StrCat("rank ", number, " exited with code ", exit_code));
    rank.mutable_cause()->add_log_tail("last words");
  }
  Report(rank, v1::RANK_STATE_EXITED);
  Report(rank, v1::RANK_STATE_GONE);
}

void FakeWorker::Finish(v1::RankReport& rank) {
  Report(rank, v1::RANK_STATE_RUNNING);
  v1::WorkerMessage message;
  v1::Progress& progress = *message.mutable_progress();
  *progress.mutable_ref() = rank.ref();
  progress.mutable_report()->set_step(1);
  progress.mutable_report()->set_loss(2.5);
  Send(std::move(message));
  if (!options_.finish_when_met) return;
  rank.set_exit_code(0);
  Report(rank, v1::RANK_STATE_EXITED);
  Report(rank, v1::RANK_STATE_GONE);
}

void FakeWorker::Read() {
  v1::CoordinatorMessage message;
  while (stream_->Read(&message)) {
    std::lock_guard lock(mutex_);
    Handle(message);
  }
}

void FakeWorker::Handle(const v1::CoordinatorMessage& message) {
  switch (message.kind_case()) {
    case v1::CoordinatorMessage::kHelloAck:
      epoch_ = message.hello_ack().epoch();
      return;
    case v1::CoordinatorMessage::kStart: {
      const v1::StartRank& start = message.start();
      v1::RankReport& rank = ranks_[start.ref().rank()];
      if (rank.ref().fence().nonce() == start.ref().fence().nonce()) return;
      rank.Clear();
      *rank.mutable_ref() = start.ref();
      rank.set_slot(start.slot());
      generation_ = start.ref().fence().generation();
      Report(rank, v1::RANK_STATE_STARTED);
      rank.set_address(absl::StrCat(options_.name, "/", start.ref().rank()));
      rank.set_plan_hash(start.plan().plan_hash());
      return Report(rank, v1::RANK_STATE_READY);
    }
    case v1::CoordinatorMessage::kPeers: {
      for (auto& [number, rank] : ranks_) {
        if (rank.ref().fence().nonce() == message.peers().fence().nonce() &&
            rank.state() == v1::RANK_STATE_READY) {
          Finish(rank);
        }
      }
      return;
    }
    case v1::CoordinatorMessage::kStop: {
      const bool notice = message.stop().grace_millis() > 0;
      stop_grace_ = absl::Milliseconds(message.stop().grace_millis());
      for (auto& [number, rank] : ranks_) {
        if (rank.ref().fence().nonce() != message.stop().fence().nonce() ||
            rank.state() >= v1::RANK_STATE_EXITED) {
          continue;
        }
        if (notice && rank.state() == v1::RANK_STATE_RUNNING) {
          rank.set_exit_code(1);
          rank.set_stopped_on_notice(true);
        } else {
          rank.set_signal(9);
          rank.set_signal_sent_by_worker(true);
        }
        Report(rank, v1::RANK_STATE_EXITED);
        Report(rank, v1::RANK_STATE_GONE);
      }
      return;
    }
    case v1::CoordinatorMessage::kOpenLog:
      return Upload(message.open_log());
    default:
      return;
  }
}

void FakeWorker::Upload(const v1::OpenLog& request) {
  Followed& upload = followed_.emplace_back();
  upload.writer = stub_->UploadLog(&upload.context, &upload.response);
  v1::LogChunk chunk;
  chunk.set_request_id(request.request_id());
  for (int line = 0; line < 3; ++line) {
    chunk.set_offset(request.offset() + 7 * line);
    const char* word = request.file() == v1::RANK_FILE_STEPS ? "step " : "line ";
    chunk.set_data(absl::StrCat(word, line, "\n"));
    upload.writer->Write(chunk);
  }
  if (request.follow()) return;
  if (!options_.break_logs_off) {
    chunk.clear_data();
    chunk.set_complete(true);
    upload.writer->Write(chunk);
  }
  upload.writer->WritesDone();
  upload.writer->Finish();
  followed_.pop_back();
}

}  // namespace upipe::coordinator
