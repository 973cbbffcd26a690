#include "engine/comm/transport_communicator.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"

namespace upipe::comm {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kDoubleBytes = sizeof(double);

// The point at which an operation has ended.
class Completion final : public kernels::Event::State {
 public:
  bool Done() const override {
    return outcome_.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  absl::Status Synchronize() override { return outcome_.get(); }
  void Set(const absl::Status& status) { promise_.set_value(status); }

 private:
  std::promise<absl::Status> promise_;
  const std::shared_future<absl::Status> outcome_ = promise_.get_future().share();
};

// In groups of a fixed length, which the compiler turns into vector instructions at -O2.
void AddTo(float* __restrict sum, const float* __restrict values, int64_t count) {
  constexpr int64_t kGroup = 16;
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup) {
    for (int64_t j = 0; j < kGroup; ++j) sum[i + j] += values[i + j];
  }
  for (; i < count; ++i) sum[i] += values[i];
}

// A value that is not a number wins every maximum, so that it is seen.
double Combine(ReduceOp op, double a, double b) {
  if (op == ReduceOp::kSum) return a + b;
  return std::isnan(b) || b > a ? b : a;
}

void CopyUnlessSame(void* to, const void* from, int64_t bytes) {
  if (to != from && bytes > 0) std::memmove(to, from, bytes);
}

absl::Status Annotate(const absl::Status& status, const char* name, int64_t number, int rank,
                      int size) {
  return absl::Status(status.code(), absl::StrCat("collective ", number, " (", name, ") on rank ",
                                                  rank, " of ", size, ": ", status.message()));
}

}  // namespace

TransportCommunicator::TransportCommunicator(std::unique_ptr<SerialThread> thread,
                                             std::unique_ptr<Transport> transport,
                                             const CommOptions& options)
    : options_(options),
      traffic_(transport->rank(), transport->size()),
      transport_(std::move(transport)),
      thread_(std::move(thread)) {}

TransportCommunicator::~TransportCommunicator() {
  thread_->Run([this] {
    if (transport_->status().ok()) transport_->Close();
    transport_.reset();
  });
}

absl::Status TransportCommunicator::Issue(const char* name, const absl::Status& validity,
                                          Exchange exchange, kernels::Stream& stream) {
  if (!validity.ok()) transport_->Abort(validity);
  if (absl::Status dead = status(); !dead.ok()) {
    stream.Wait(EventWithStatus(dead));
    return dead;
  }
  auto completion = std::make_shared<Completion>();
  const int64_t number = ++num_issued_;
  thread_->Post(
      [this, name, number, completion, start = stream.Record(), exchange = std::move(exchange)] {
        completion->Set(RunOnThread(name, number, start, exchange));
      });
  stream.Wait(kernels::Event(completion));
  return absl::OkStatus();
}

absl::Status TransportCommunicator::RunOnThread(const char* name, int64_t number,
                                                const kernels::Event& start,
                                                const Exchange& exchange) {
  if (absl::Status reached = start.Synchronize(); !reached.ok()) return Die(reached);
  UPIPE_RETURN_IF_ERROR(status());
  if (options_.observer.entered) options_.observer.entered(number);
  const SteadyTime begin = std::chrono::steady_clock::now();
  absl::Status result =
      exchange(Call{*transport_, static_cast<uint32_t>(number), After(options_.deadline)});
  // Messages of a pair keep their order: what was left over one collective ago is here by now.
  if (result.ok()) result = transport_->CheckNothingUnexpected(static_cast<uint32_t>(number - 1));
  traffic_.AddSeconds(
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  if (!result.ok()) {
    transport_->Withdraw();
    result = Die(Annotate(result, name, number, rank(), size()));
  }
  if (options_.observer.left) options_.observer.left(number);
  return result;
}

absl::Status TransportCommunicator::Die(const absl::Status& error) {
  transport_->Abort(error);
  return status();
}

absl::Status TransportCommunicator::ExchangeBlocks(const Call& call,
                                                   const AllToAllVParams& params) {
  Transport& transport = call.transport;
  const int rank = transport.rank();
  std::vector<const Block*> own;
  std::vector<uint32_t> index(transport.size(), 0);
  for (const Block& receive : params.receives) {
    const MessageTag tag{call.collective, index[receive.peer]++};
    if (receive.bytes == 0) continue;
    if (receive.peer == rank) {
      own.push_back(&receive);
    } else {
      transport.PostReceive(receive.peer, tag, receive.data, receive.bytes);
    }
  }
  std::fill(index.begin(), index.end(), 0);
  for (const Block& send : params.sends) {
    const MessageTag tag{call.collective, index[send.peer]++};
    if (send.bytes > 0 && send.peer != rank)
      transport.PostSend(send.peer, tag, send.data, send.bytes);
  }
  auto landing = own.begin();
  for (const Block& send : params.sends) {
    if (send.bytes == 0 || send.peer != rank) continue;
    CopyUnlessSame((*landing)->data, send.data, send.bytes);
    ++landing;
  }
  return transport.WaitAll(call.deadline);
}

absl::Status TransportCommunicator::AllToAllV(const AllToAllVParams& params,
                                              kernels::Stream& stream) {
  return Issue(
      "all-to-all", traffic_.AddAllToAllV(params),
      [params](const Call& call) { return ExchangeBlocks(call, params); }, stream);
}

absl::Status TransportCommunicator::GatherAll(const Call& call, const void* send, void* receive,
                                              int64_t bytes) {
  Transport& transport = call.transport;
  if (bytes == 0) return absl::OkStatus();
  auto* out = static_cast<char*>(receive);
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer != transport.rank())
      transport.PostReceive(peer, {call.collective, 0}, out + peer * bytes, bytes);
  }
  for (int peer = 0; peer < transport.size(); ++peer) {
    if (peer != transport.rank()) transport.PostSend(peer, {call.collective, 0}, send, bytes);
  }
  CopyUnlessSame(out + transport.rank() * bytes, send, bytes);
  return transport.WaitAll(call.deadline);
}

absl::Status TransportCommunicator::AllGather(const void* send, void* receive, int64_t bytes,
                                              kernels::Stream& stream) {
  return Issue(
      "all-gather", traffic_.AddAllGather(send, receive, bytes),
      [=](const Call& call) { return GatherAll(call, send, receive, bytes); }, stream);
}

// `send` points at this piece of rank 0's block; blocks lie `stride` floats apart. Two landing
// buffers: while one contribution is added, the next arrives.
absl::Status TransportCommunicator::ReducePiece(const Call& call, uint32_t piece, const float* send,
                                                float* receive, int64_t count, int64_t stride,
                                                float* scratch) {
  Transport& transport = call.transport;
  const int rank = transport.rank();
  const int size = transport.size();
  const MessageTag tag{call.collective, piece};
  const int64_t bytes = count * kFloatBytes;
  const auto peer_at = [rank](int i) { return i < rank ? i : i + 1; };
  float* const landing[2] = {scratch, scratch + (size > 2 ? count : 0)};

  int arriving = transport.PostReceive(peer_at(0), tag, landing[0], bytes);
  for (int i = 1; i < size; ++i) {
    const int peer = (rank + i) % size;
    transport.PostSend(peer, tag, send + peer * stride, bytes);
  }
  const auto contribute = [&](int from, const float* values) {
    if (from == 0) {
      std::memcpy(receive, values, bytes);
    } else {
      AddTo(receive, values, count);
    }
  };
  for (int i = 0; i < size - 1; ++i) {
    if (peer_at(i) == rank + 1) contribute(rank, send + rank * stride);
    const int current = arriving;
    if (i + 1 < size - 1)
      arriving = transport.PostReceive(peer_at(i + 1), tag, landing[(i + 1) % 2], bytes);
    UPIPE_RETURN_IF_ERROR(transport.Wait(current, call.deadline));
    contribute(peer_at(i), landing[i % 2]);
  }
  if (rank == size - 1) contribute(rank, send + rank * stride);
  return transport.WaitAll(call.deadline);
}

absl::Status TransportCommunicator::ReduceScatter(const float* send, float* receive, int64_t count,
                                                  void* scratch, kernels::Stream& stream) {
  const auto exchange = [=](const Call& call) -> absl::Status {
    if (call.transport.size() == 1) {
      CopyUnlessSame(receive, send, count * kFloatBytes);
      return absl::OkStatus();
    }
    constexpr int64_t kPieceCount = kReducePieceBytes / kFloatBytes;
    uint32_t piece = 0;
    for (int64_t begin = 0; begin < count; begin += kPieceCount, ++piece) {
      UPIPE_RETURN_IF_ERROR(ReducePiece(call, piece, send + begin, receive + begin,
                                        std::min(kPieceCount, count - begin), count,
                                        static_cast<float*>(scratch)));
    }
    return absl::OkStatus();
  };
  return Issue("reduce-scatter", traffic_.AddReduceScatter(send, receive, count, scratch), exchange,
               stream);
}

int64_t TransportCommunicator::ReduceScatterScratchBytes(int64_t count) const {
  return ReduceScatterScratchBytesFor(size(), count);
}

absl::Status TransportCommunicator::AllReduce(double* values, int64_t count, ReduceOp op,
                                              void* scratch, kernels::Stream& stream) {
  const auto exchange = [=](const Call& call) -> absl::Status {
    const int size = call.transport.size();
    if (size == 1) return absl::OkStatus();
    auto* gathered = static_cast<double*>(scratch);
    UPIPE_RETURN_IF_ERROR(GatherAll(call, values, gathered, count * kDoubleBytes));
    for (int64_t i = 0; i < count; ++i) {
      double result = gathered[i];
      for (int peer = 1; peer < size; ++peer)
        result = Combine(op, result, gathered[peer * count + i]);
      values[i] = result;
    }
    return absl::OkStatus();
  };
  return Issue("all-reduce", traffic_.AddAllReduce(values, count, scratch), exchange, stream);
}

int64_t TransportCommunicator::AllReduceScratchBytes(int64_t count) const {
  return AllReduceScratchBytesFor(size(), count);
}

absl::Status TransportCommunicator::Barrier(kernels::Stream& stream) {
  const auto exchange = [](const Call& call) {
    const char ours = 0;
    std::vector<char> theirs(call.transport.size());
    absl::Status status = GatherAll(call, &ours, theirs.data(), 1);
    if (!status.ok()) call.transport.Withdraw();  // before the bytes above go out of scope
    return status;
  };
  return Issue("barrier", traffic_.AddBarrier(), exchange, stream);
}

void TransportCommunicator::Abort(absl::Status cause) {
  UPIPE_CHECK(!cause.ok()) << "an abort needs a cause";
  transport_->Abort(cause);
}

absl::Status TransportCommunicator::status() const { return transport_->status(); }

CommStats TransportCommunicator::stats() const { return traffic_.stats(); }

}  // namespace upipe::comm
