#include "engine/comm/nccl/nccl_communicator.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/status.h"

namespace upipe::comm {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kDoubleBytes = sizeof(double);
// Messages of a sum are not cut shorter than this for more of them to fit.
constexpr int64_t kMessageCountMin = int64_t{1} << 18;
constexpr int64_t kVectorCount = 4;  // pieces begin where 16-byte accesses may
constexpr int64_t kBlockBytes = 16;  // of the warm-up

// The i-th rank of a group but for the one at `index`; and where that one is among those of the
// i-th.
int OtherThan(int index, int i) { return i < index ? i : i + 1; }
int SeenFrom(int other, int index) { return index < other ? index : index - 1; }

// Keeps the first result that is an error.
class Results {
 public:
  void Add(NcclResult result) {
    if (result != NcclResult::kSuccess && result != NcclResult::kInProgress && !failed_) {
      failed_ = true;
      first_ = result;
    }
  }
  NcclResult first() const { return first_; }

 private:
  bool failed_ = false;
  NcclResult first_ = NcclResult::kSuccess;
};

}  // namespace

NcclReducePieces PiecesOf(const ReduceRoom& room, int group_size, int64_t count) {
  const int64_t elements = ReduceScatterScratchBytesFor(room, group_size, count) / kFloatBytes;
  const int64_t least = std::max<int64_t>(1, std::min(count, kMessageCountMin));
  NcclReducePieces pieces;
  pieces.peers = static_cast<int>(std::clamp<int64_t>(elements / least, 1, group_size - 1));
  pieces.piece = std::min(count, elements / pieces.peers);
  if (pieces.piece < count && pieces.piece > kVectorCount)
    pieces.piece -= pieces.piece % kVectorCount;
  return pieces;
}

NcclCommunicator::NcclCommunicator(Parts parts)
    : Communicator(parts.ledger->traffic.size()),
      options_(parts.options),
      close_deadline_(parts.close_deadline),
      device_(std::move(parts.device)),
      ledger_(std::move(parts.ledger)),
      link_(std::move(parts.link)),
      stream_(device_->CreateStream("comm")) {}

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Create(Parts parts) {
  const absl::Duration deadline = parts.connect_deadline;
  std::unique_ptr<NcclCommunicator> comm(new NcclCommunicator(std::move(parts)));
  UPIPE_RETURN_IF_ERROR(comm->WarmUp(deadline));
  comm->watch_ = std::make_unique<NcclWatch>(*comm->link_, comm->ledger_, comm->options_);
  return comm;
}

NcclCommunicator::~NcclCommunicator() {
  watch_.reset();
  link_->Close(After(close_deadline_));
}

// A pair's first message makes NCCL connect it, and the first all-gather of a communicator its
// rings.
absl::Status NcclCommunicator::WarmUp(absl::Duration deadline) {
  UPIPE_ASSIGN_OR_RETURN(memory_, device_->Allocate((size() + 1) * kBlockBytes));
  char* const in = static_cast<char*>(memory_.get());
  char* const out = in + size() * kBlockBytes;
  AllToAllVParams each;
  for (int peer = 0; peer < size(); ++peer) {
    each.sends.push_back({peer, out, kBlockBytes});
    each.receives.push_back({peer, in + peer * kBlockBytes, kBlockBytes});
  }
  watch_ = std::make_unique<NcclWatch>(*link_, ledger_, CommOptions{.deadline = deadline});
  return Run(std::nullopt, 0, kernels::Event(),
             [&] {
               absl::Status done = Exchange(each);
               if (done.ok()) done = Gather(everyone(), out, in, kBlockBytes);
               for (const RankGroup& part : options_.parts) {
                 if (done.ok()) done = Gather(part, out, in, kBlockBytes);
               }
               return done;
             })
      ->Synchronize();
}

std::shared_ptr<NcclOperation> NcclCommunicator::Run(std::optional<CommOperation> kind,
                                                     int64_t number, const kernels::Event& start,
                                                     const std::function<absl::Status()>& enqueue) {
  auto operation = std::make_shared<NcclOperation>(kind, number, ledger_);
  stream_->Wait(start);
  operation->begin = stream_->Record();
  operation->begin_mark = device_->RecordMark(*stream_);
  const absl::Status enqueued = enqueue();
  operation->end_mark = device_->RecordMark(*stream_);
  operation->end = stream_->Record();
  if (!enqueued.ok()) watch_->Die(InCollective(enqueued, operation->name, number, rank(), size()));
  watch_->Add(operation);
  return operation;
}

absl::Status NcclCommunicator::Issue(CommOperation operation, const absl::Status& validity,
                                     const std::function<absl::Status()>& enqueue,
                                     kernels::Stream& stream) {
  if (!validity.ok()) watch_->Die(validity);
  if (absl::Status dead = status(); !dead.ok()) {
    stream.Wait(EventWithStatus(dead));
    return dead;
  }
  stream.Wait(kernels::Event(Run(operation, ++num_issued_, stream.Record(), enqueue)));
  return absl::OkStatus();
}

absl::Status NcclCommunicator::Group(const NcclLink::Calls& calls) {
  return link_->Group(calls, After(options_.deadline));
}

void NcclCommunicator::CopyHere(void* to, const void* from, int64_t bytes) {
  if (to != from && bytes > 0) device_->Copy(to, from, bytes, *stream_);
}

absl::Status NcclCommunicator::Exchange(const AllToAllVParams& params) {
  std::vector<const Block*> landings;
  for (const Block& receive : params.receives) {
    if (receive.peer == rank() && receive.bytes > 0) landings.push_back(&receive);
  }
  auto landing = landings.begin();
  for (const Block& send : params.sends) {
    if (send.peer != rank() || send.bytes == 0) continue;
    CopyHere((*landing++)->data, send.data, send.bytes);
  }
  if (size() == 1) return absl::OkStatus();
  return Group([&](NcclApi& api, NcclComm* comm) {
    Results results;
    for (const Block& send : params.sends) {
      if (send.peer != rank() && send.bytes > 0)
        results.Add(api.Send(send.data, send.bytes, send.peer, comm, *stream_));
    }
    for (const Block& receive : params.receives) {
      if (receive.peer != rank() && receive.bytes > 0)
        results.Add(api.Recv(receive.data, receive.bytes, receive.peer, comm, *stream_));
    }
    return results.first();
  });
}

absl::Status NcclCommunicator::AllToAllV(const AllToAllVParams& params, kernels::Stream& stream) {
  return Issue(
      OperationOf(params), ledger_->traffic.AddAllToAllV(params), [&] { return Exchange(params); },
      stream);
}

absl::Status NcclCommunicator::Gather(const RankGroup& group, const void* send, void* receive,
                                      int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  const int group_size = static_cast<int>(group.size());
  auto* const out = static_cast<char*>(receive);
  const auto gather = [&](NcclApi& api, NcclComm* comm) {
    return api.AllGather(send, receive, bytes, comm, *stream_);
  };
  if (group_size == size() && size() > 1) return Group(gather);
  const auto part = std::find(options_.parts.begin(), options_.parts.end(), group);
  if (part != options_.parts.end() && group_size > 1) {
    return link_->GroupIn(static_cast<size_t>(part - options_.parts.begin()), gather,
                          After(options_.deadline));
  }
  CopyHere(out + IndexIn(group, rank()) * bytes, send, bytes);
  if (group_size == 1) return absl::OkStatus();
  return Group([&](NcclApi& api, NcclComm* comm) {
    Results results;
    for (int i = 0; i < group_size; ++i) {
      if (group[i] == rank()) continue;
      results.Add(api.Send(send, bytes, group[i], comm, *stream_));
      results.Add(api.Recv(out + i * bytes, bytes, group[i], comm, *stream_));
    }
    return results.first();
  });
}

absl::Status NcclCommunicator::AllGather(const RankGroup& group, const void* send, void* receive,
                                         int64_t bytes, kernels::Stream& stream) {
  return Issue(
      CommOperation::kAllGather, ledger_->traffic.AddAllGather(group, send, receive, bytes),
      [&] { return Gather(group, send, receive, bytes); }, stream);
}

// Elements [begin, begin + a piece) of every block, batch by batch of contributing ranks.
absl::Status NcclCommunicator::ReducePiece(const Reduction& reduction,
                                           const NcclReducePieces& pieces, int64_t begin) {
  const int size = static_cast<int>(reduction.group.size());
  const int index = IndexIn(reduction.group, rank());
  const int64_t count = std::min(pieces.piece, reduction.count - begin);
  const auto block_of = [&](int i) { return reduction.send + i * reduction.count + begin; };
  const float* own = block_of(index);  // until it was added
  for (int first = 0; first < size - 1; first += pieces.peers) {
    const int end = std::min(first + pieces.peers, size - 1);
    OrderedSum sum{.accumulate = first > 0, .count = count, .sum = reduction.receive + begin};
    for (int i = first; i < end; ++i) {
      if (own != nullptr && OtherThan(index, i) > index)
        sum.terms.push_back(std::exchange(own, nullptr));
      sum.terms.push_back(reduction.scratch + (i - first) * pieces.piece);
    }
    if (own != nullptr && end == size - 1) sum.terms.push_back(own);
    UPIPE_RETURN_IF_ERROR(Group([&](NcclApi& api, NcclComm* comm) {
      Results results;
      for (int to = 0; to < size; ++to) {
        if (to == index) continue;
        const int seen = SeenFrom(to, index);
        if (seen < first || seen >= end) continue;
        results.Add(
            api.Send(block_of(to), count * kFloatBytes, reduction.group[to], comm, *stream_));
      }
      for (int i = first; i < end; ++i) {
        results.Add(api.Recv(reduction.scratch + (i - first) * pieces.piece, count * kFloatBytes,
                             reduction.group[OtherThan(index, i)], comm, *stream_));
      }
      return results.first();
    }));
    device_->Sum(sum, *stream_);
  }
  return absl::OkStatus();
}

absl::Status NcclCommunicator::Reduce(const Reduction& reduction) {
  const int size = static_cast<int>(reduction.group.size());
  if (size == 1) {
    CopyHere(reduction.receive, reduction.send, reduction.count * kFloatBytes);
    return absl::OkStatus();
  }
  const NcclReducePieces pieces = PiecesOf(options_.reduce_room, size, reduction.count);
  for (int64_t begin = 0; begin < reduction.count; begin += pieces.piece) {
    UPIPE_RETURN_IF_ERROR(ReducePiece(reduction, pieces, begin));
  }
  return absl::OkStatus();
}

absl::Status NcclCommunicator::ReduceScatter(const RankGroup& group, const float* send,
                                             float* receive, int64_t count, void* scratch,
                                             kernels::Stream& stream) {
  const Reduction reduction{group, send, receive, count, static_cast<float*>(scratch)};
  return Issue(
      CommOperation::kReduceScatter,
      ledger_->traffic.AddReduceScatter(group, send, receive, count, scratch),
      [&] { return Reduce(reduction); }, stream);
}

int64_t NcclCommunicator::ReduceScatterScratchBytes(int group_size, int64_t count) const {
  return ReduceScatterScratchBytesFor(options_.reduce_room, group_size, count);
}

absl::Status NcclCommunicator::AllReduce(double* values, int64_t count, ReduceOp op, void* scratch,
                                         kernels::Stream& stream) {
  const auto enqueue = [&]() -> absl::Status {
    if (size() == 1) return absl::OkStatus();
    UPIPE_RETURN_IF_ERROR(Gather(everyone(), values, scratch, count * kDoubleBytes));
    device_->Combine({.op = op,
                      .gathered = static_cast<const double*>(scratch),
                      .num_ranks = size(),
                      .count = count,
                      .values = values},
                     *stream_);
    return absl::OkStatus();
  };
  return Issue(CommOperation::kAllReduce, ledger_->traffic.AddAllReduce(values, count, scratch),
               enqueue, stream);
}

int64_t NcclCommunicator::AllReduceScratchBytes(int64_t count) const {
  return AllReduceScratchBytesFor(size(), count);
}

absl::Status NcclCommunicator::Barrier(kernels::Stream& stream) {
  char* const in = static_cast<char*>(memory_.get());
  return Issue(
      CommOperation::kBarrier, ledger_->traffic.AddBarrier(),
      [&] { return Gather(everyone(), in + size() * kBlockBytes, in, 1); }, stream);
}

void NcclCommunicator::Abort(absl::Status cause) {
  UPIPE_CHECK(!cause.ok()) << "an abort needs a cause";
  watch_->Die(cause);
}

}  // namespace upipe::comm
