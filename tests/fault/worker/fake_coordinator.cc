#include "tests/fault/worker/fake_coordinator.h"

#include <chrono>

#include "absl/strings/str_cat.h"

namespace upipe::worker {

FakeCoordinator::FakeCoordinator(const std::string& address) {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  address_ = absl::StrCat("127.0.0.1:", port);
}

FakeCoordinator::~FakeCoordinator() {
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
}

bool FakeCoordinator::WaitUntil(const std::function<bool()>& met) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::seconds(15), met);
}

bool FakeCoordinator::WaitForState(int rank, v1::RankState state, int64_t generation) {
  return WaitUntil([&] {
    const auto found = ranks.find({generation, rank});
    return found != ranks.end() && found->second.state() == state;
  });
}

grpc::Status FakeCoordinator::Session(grpc::ServerContext*, SessionStream* stream) {
  v1::WorkerMessage message;
  while (stream->Read(&message)) {
    std::lock_guard lock(mutex_);
    Hear(message, stream);
    changed_.notify_all();
  }
  std::lock_guard lock(mutex_);
  if (stream_ == stream) stream_ = nullptr;
  return grpc::Status::OK;
}

void FakeCoordinator::Hear(const v1::WorkerMessage& message, SessionStream* stream) {
  v1::CoordinatorMessage reply;
  if (message.has_hello()) {
    stream_ = stream;
    hellos.push_back(message.hello());
    v1::HelloAck& ack = *reply.mutable_hello_ack();
    ack.set_epoch(epoch_);
    ack.mutable_timing()->set_heartbeat_millis(200);
    ack.mutable_timing()->set_kill_bound_millis(2000);
    ack.mutable_timing()->set_autonomy_millis(3000);
    ack.mutable_timing()->set_margin_millis(1000);
  } else if (message.has_heartbeat()) {
    leaving = message.heartbeat().leaving();
    devices.assign(message.heartbeat().devices().begin(), message.heartbeat().devices().end());
    positions.clear();
    for (const v1::AttemptPositions& attempt : message.heartbeat().attempts()) {
      for (const v1::RankPosition& position : attempt.ranks())
        positions[{attempt.fence().generation(), position.rank()}] = position;
    }
    reply.mutable_heartbeat_ack()->set_sequence(message.sequence());
  } else if (message.has_rank()) {
    const std::pair<int64_t, int> key{message.rank().ref().fence().generation(),
                                      message.rank().ref().rank()};
    ranks[key] = message.rank();
    std::vector<v1::RankState>& seen = states[key];
    if (seen.empty() || seen.back() != message.rank().state())
      seen.push_back(message.rank().state());
    if (!acknowledge_ranks_) return;
    reply.mutable_rank_ack()->set_sequence(message.sequence());
  } else {
    progress[message.progress().ref().rank()] = message.progress().report();
    return;
  }
  stream->Write(reply);
}

grpc::Status FakeCoordinator::UploadLog(grpc::ServerContext*,
                                        grpc::ServerReader<v1::LogChunk>* reader,
                                        v1::UploadLogResponse*) {
  v1::LogChunk chunk;
  while (reader->Read(&chunk)) {
    std::lock_guard lock(mutex_);
    absl::StrAppend(&logs[chunk.request_id()], chunk.data(), chunk.error());
    logs_complete[chunk.request_id()] = chunk.complete();
    changed_.notify_all();
  }
  std::lock_guard lock(mutex_);
  logs_ended[chunk.request_id()] = true;
  changed_.notify_all();
  return grpc::Status::OK;
}

void FakeCoordinator::Send(const v1::CoordinatorMessage& message) {
  std::lock_guard lock(mutex_);
  if (stream_ != nullptr) stream_->Write(message);
}

v1::Fence FakeCoordinator::MakeFence(int64_t generation, const std::string& nonce) const {
  v1::Fence fence;
  fence.set_job_id("job-1");
  fence.set_generation(generation);
  fence.set_nonce(nonce);
  fence.set_epoch(epoch_);
  return fence;
}

void FakeCoordinator::Start(const std::string& mode, int64_t generation, const std::string& nonce,
                            int rank, int slot, int num_ranks) {
  v1::RunPlan plan;
  plan.mutable_spec()->set_name(mode);
  plan.mutable_spec()->mutable_train()->set_steps(3);
  plan.mutable_spec()->mutable_parallel()->set_ranks(num_ranks);
  plan.set_plan_hash(77);
  Start(plan, generation, nonce, rank, slot);
}

void FakeCoordinator::Start(const v1::RunPlan& plan, int64_t generation, const std::string& nonce,
                            int rank, int slot) {
  v1::CoordinatorMessage message;
  v1::StartRank& start = *message.mutable_start();
  *start.mutable_ref()->mutable_fence() = MakeFence(generation, nonce);
  start.mutable_ref()->set_rank(rank);
  start.set_slot(slot);
  *start.mutable_plan() = plan;
  for (int i = 0; i < plan.spec().parallel().ranks(); ++i) start.add_node_ids("n1");
  Send(message);
}

void FakeCoordinator::Retain(int64_t generation, const std::string& nonce, int keep) {
  v1::CoordinatorMessage message;
  *message.mutable_retain()->mutable_fence() = MakeFence(generation, nonce);
  message.mutable_retain()->set_keep(keep);
  Send(message);
}

void FakeCoordinator::SendPeers(int64_t generation, const std::string& nonce, int64_t resume_step) {
  v1::CoordinatorMessage message;
  if (resume_step > 0) message.mutable_peers()->mutable_resume()->set_step(resume_step);
  *message.mutable_peers()->mutable_fence() = MakeFence(generation, nonce);
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, report] : ranks) {
      if (key.first == generation) message.mutable_peers()->add_addresses(report.address());
    }
  }
  Send(message);
}

void FakeCoordinator::Stop(int64_t generation, const std::string& nonce, int64_t grace_millis) {
  v1::CoordinatorMessage message;
  *message.mutable_stop()->mutable_fence() = MakeFence(generation, nonce);
  message.mutable_stop()->set_grace_millis(grace_millis);
  message.mutable_stop()->set_reason("cancelled by a test");
  Send(message);
}

void FakeCoordinator::OpenLog(const std::string& request_id, int64_t generation, int rank,
                              int64_t offset, bool follow, v1::RankFile file) {
  v1::CoordinatorMessage message;
  v1::OpenLog& open = *message.mutable_open_log();
  open.set_request_id(request_id);
  *open.mutable_ref()->mutable_fence() = MakeFence(generation, "");
  open.mutable_ref()->set_rank(rank);
  open.set_offset(offset);
  open.set_follow(follow);
  open.set_file(file);
  Send(message);
}

}  // namespace upipe::worker
