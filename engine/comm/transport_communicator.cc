#include "engine/comm/transport_communicator.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"

namespace upipe::comm {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kDoubleBytes = sizeof(double);
constexpr int64_t kPieceCount = ReduceRoom().piece_bytes / kFloatBytes;  // any room has two

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

}  // namespace

TransportCommunicator::TransportCommunicator(std::unique_ptr<SerialThread> thread,
                                             std::unique_ptr<Transport> transport,
                                             const CommOptions& options,
                                             std::shared_ptr<LocalWork> work)
    : Communicator(transport->size()),
      options_(options),
      traffic_(transport->rank(), transport->size()),
      work_(work != nullptr ? std::move(work) : CreateHostWork()),
      transport_(std::move(transport)),
      thread_(std::move(thread)) {}

TransportCommunicator::~TransportCommunicator() {
  thread_->Run([this] {
    if (transport_->status().ok()) transport_->Close();
    transport_.reset();
  });
}

absl::Status TransportCommunicator::Issue(CommOperation operation, const absl::Status& validity,
                                          Exchange exchange, kernels::Stream& stream) {
  if (!validity.ok()) transport_->Abort(validity);
  if (absl::Status dead = status(); !dead.ok()) {
    stream.Wait(EventWithStatus(dead));
    return dead;
  }
  auto completion = std::make_shared<Completion>();
  const int64_t number = ++num_issued_;
  thread_->Post([this, operation, number, completion, start = stream.Record(),
                 exchange = std::move(exchange)] {
    completion->Set(RunOnThread(operation, number, start, exchange));
  });
  stream.Wait(kernels::Event(completion));
  return absl::OkStatus();
}

absl::Status TransportCommunicator::RunOnThread(CommOperation operation, int64_t number,
                                                const kernels::Event& start,
                                                const Exchange& exchange) {
  if (absl::Status reached = start.Synchronize(); !reached.ok()) return Die(reached);
  UPIPE_RETURN_IF_ERROR(status());
  if (options_.observer.entered) options_.observer.entered(number);
  const SteadyTime begin = std::chrono::steady_clock::now();
  absl::Status result =
      exchange(Call{*transport_, *work_, static_cast<uint32_t>(number), After(options_.deadline)});
  // Messages of a pair keep their order: what was left over one collective ago is here by now.
  if (result.ok()) result = transport_->CheckNothingUnexpected(static_cast<uint32_t>(number - 1));
  traffic_.AddSeconds(
      operation, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  if (!result.ok()) {
    transport_->Withdraw();
    result = Die(InCollective(result, NameOf(operation), number, rank(), size()));
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
    UPIPE_RETURN_IF_ERROR(call.work.Copy((*landing)->data, send.data, send.bytes));
    ++landing;
  }
  return transport.WaitAll(call.deadline);
}

absl::Status TransportCommunicator::AllToAllV(const AllToAllVParams& params,
                                              kernels::Stream& stream) {
  return Issue(
      OperationOf(params), traffic_.AddAllToAllV(params),
      [params](const Call& call) { return ExchangeBlocks(call, params); }, stream);
}

absl::Status TransportCommunicator::Gather(const Call& call, const RankGroup& group,
                                           const void* send, void* receive, int64_t bytes) {
  Transport& transport = call.transport;
  if (bytes == 0) return absl::OkStatus();
  auto* out = static_cast<char*>(receive);
  for (size_t i = 0; i < group.size(); ++i) {
    if (group[i] != transport.rank())
      transport.PostReceive(group[i], {call.collective, 0}, out + i * bytes, bytes);
  }
  for (int peer : group) {
    if (peer != transport.rank()) transport.PostSend(peer, {call.collective, 0}, send, bytes);
  }
  UPIPE_RETURN_IF_ERROR(
      call.work.Copy(out + IndexIn(group, transport.rank()) * bytes, send, bytes));
  return transport.WaitAll(call.deadline);
}

absl::Status TransportCommunicator::AllGather(const RankGroup& group, const void* send,
                                              void* receive, int64_t bytes,
                                              kernels::Stream& stream) {
  return Issue(
      CommOperation::kAllGather, traffic_.AddAllGather(group, send, receive, bytes),
      [=](const Call& call) { return Gather(call, group, send, receive, bytes); }, stream);
}

// Elements [begin, begin + a piece) of every block. Two landing buffers: while one contribution is
// added, the next arrives.
absl::Status TransportCommunicator::ReducePiece(const Call& call, const Reduction& reduction,
                                                int64_t begin) {
  Transport& transport = call.transport;
  const int size = static_cast<int>(reduction.group.size());
  const int index = IndexIn(reduction.group, transport.rank());
  const MessageTag tag{call.collective, static_cast<uint32_t>(begin / kPieceCount)};
  const int64_t count = std::min(kPieceCount, reduction.count - begin);
  const int64_t bytes = count * kFloatBytes;
  const auto block_of = [&](int i) { return reduction.send + i * reduction.count + begin; };
  const auto other = [index](int i) { return i < index ? i : i + 1; };  // the i-th but for this one
  float* const landing[2] = {reduction.scratch, reduction.scratch + (size > 2 ? count : 0)};

  int arriving = transport.PostReceive(reduction.group[other(0)], tag, landing[0], bytes);
  for (int i = 1; i < size; ++i) {
    const int to = (index + i) % size;
    transport.PostSend(reduction.group[to], tag, block_of(to), bytes);
  }
  const auto contribute = [&](int from, const float* values) {
    float* const sum = reduction.receive + begin;
    return from == 0 ? call.work.Copy(sum, values, bytes) : call.work.Add(sum, values, count);
  };
  for (int i = 0; i < size - 1; ++i) {
    if (other(i) == index + 1) UPIPE_RETURN_IF_ERROR(contribute(index, block_of(index)));
    const int current = arriving;
    if (i + 1 < size - 1) {
      arriving =
          transport.PostReceive(reduction.group[other(i + 1)], tag, landing[(i + 1) % 2], bytes);
    }
    UPIPE_RETURN_IF_ERROR(transport.Wait(current, call.deadline));
    UPIPE_RETURN_IF_ERROR(contribute(other(i), landing[i % 2]));
  }
  if (index == size - 1) UPIPE_RETURN_IF_ERROR(contribute(index, block_of(index)));
  return transport.WaitAll(call.deadline);
}

absl::Status TransportCommunicator::Reduce(const Call& call, const Reduction& reduction) {
  if (reduction.group.size() == 1) {
    return call.work.Copy(reduction.receive, reduction.send, reduction.count * kFloatBytes);
  }
  for (int64_t begin = 0; begin < reduction.count; begin += kPieceCount) {
    UPIPE_RETURN_IF_ERROR(ReducePiece(call, reduction, begin));
  }
  return absl::OkStatus();
}

absl::Status TransportCommunicator::ReduceScatter(const RankGroup& group, const float* send,
                                                  float* receive, int64_t count, void* scratch,
                                                  kernels::Stream& stream) {
  const Reduction reduction{group, send, receive, count, static_cast<float*>(scratch)};
  return Issue(
      CommOperation::kReduceScatter,
      traffic_.AddReduceScatter(group, send, receive, count, scratch),
      [reduction](const Call& call) { return Reduce(call, reduction); }, stream);
}

int64_t TransportCommunicator::ReduceScatterScratchBytes(int group_size, int64_t count) const {
  return ReduceScatterScratchBytesFor(options_.reduce_room, group_size, count);
}

absl::Status TransportCommunicator::AllReduce(double* values, int64_t count, ReduceOp op,
                                              void* scratch, kernels::Stream& stream) {
  const auto exchange = [=, this](const Call& call) -> absl::Status {
    if (size() == 1) return absl::OkStatus();
    auto* gathered = static_cast<double*>(scratch);
    UPIPE_RETURN_IF_ERROR(Gather(call, everyone(), values, gathered, count * kDoubleBytes));
    return call.work.Combine(
        {.op = op, .gathered = gathered, .num_ranks = size(), .count = count, .values = values});
  };
  return Issue(CommOperation::kAllReduce, traffic_.AddAllReduce(values, count, scratch), exchange,
               stream);
}

int64_t TransportCommunicator::AllReduceScratchBytes(int64_t count) const {
  return AllReduceScratchBytesFor(size(), count);
}

absl::Status TransportCommunicator::Barrier(kernels::Stream& stream) {
  const auto exchange = [this](const Call& call) {
    const char ours = 0;
    std::vector<char> theirs(size());
    absl::Status status = Gather(call, everyone(), &ours, theirs.data(), 1);
    if (!status.ok()) call.transport.Withdraw();  // before the bytes above go out of scope
    return status;
  };
  return Issue(CommOperation::kBarrier, traffic_.AddBarrier(), exchange, stream);
}

void TransportCommunicator::Abort(absl::Status cause) {
  UPIPE_CHECK(!cause.ok()) << "an abort needs a cause";
  transport_->Abort(cause);
}

absl::Status TransportCommunicator::status() const { return transport_->status(); }

CommStats TransportCommunicator::stats() const { return traffic_.stats(); }

}  // namespace upipe::comm
