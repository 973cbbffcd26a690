#include "tests/support/engine/fake_nccl.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"

namespace upipe::comm {

// One group of calls: its messages, in the order of issue.
struct FakeNccl::Transfer {
  enum Kind { kPointToPoint, kAllGather };
  struct Message {
    Kind kind;
    int peer;
    char* data;
    int64_t bytes;
  };
  struct Local {
    char* to;
    const char* from;
    int64_t bytes;
  };
  std::vector<Message> sends, receives;
  std::vector<Local> copies;

  void Append(const Transfer& other) {
    sends.insert(sends.end(), other.sends.begin(), other.sends.end());
    receives.insert(receives.end(), other.receives.begin(), other.receives.end());
    copies.insert(copies.end(), other.copies.begin(), other.copies.end());
  }
};

namespace {

// Group, kind, sender, receiver, index: what meets.
using Key = std::tuple<int64_t, int, int, int, int>;

struct Offer {
  const char* data;
  int64_t bytes;
  bool taken = false;
};

// The ranks of one unique id.
struct Clique {
  std::mutex mutex;
  std::condition_variable news;
  int joined = 0;
  std::vector<bool> aborted, finalized;  // [size], once the first has joined
  std::map<Key, Offer> offers;
};

}  // namespace

struct NcclComm {
  std::shared_ptr<Clique> clique;
  std::string id;
  int rank = 0;
  int size = 0;
  bool shares = false;
  // Of the fake's mutex.
  bool freed = false;
  bool finalizing = false;
  int64_t groups = 0;
  kernels::Stream* stream = nullptr;  // of what is open or pending
  std::shared_ptr<void> open;         // FakeNccl::Transfer
  std::shared_ptr<void> pending;      // not on its stream yet
  int looks_left = 0;
  int settling = 0;  // looks until a part, which is there, can be used
  int splits = 0;
  NcclComm* splitting = nullptr;  // the part that is made of it
  NcclComm** split_to = nullptr;  // where it goes once all have come
};

class FakeNcclWorld {
 public:
  std::string NewId() {
    std::lock_guard lock(mutex_);
    std::string id = absl::StrCat("fake id ", next_++, "\n");
    id.resize(kNcclIdBytes, '#');
    return id;
  }
  std::shared_ptr<Clique> Join(const std::string& id, int size) {
    std::lock_guard lock(mutex_);
    std::shared_ptr<Clique>& clique = cliques_[id];
    if (clique == nullptr) clique = std::make_shared<Clique>();
    std::lock_guard inner(clique->mutex);
    ++clique->joined;
    clique->aborted.resize(size);
    clique->finalized.resize(size);
    return clique;
  }

 private:
  std::mutex mutex_;
  int next_ = 1;
  std::map<std::string, std::shared_ptr<Clique>> cliques_;
};

std::shared_ptr<FakeNcclWorld> NewFakeNcclWorld() { return std::make_shared<FakeNcclWorld>(); }

// One of the calls that only one thread may be in at a time.
class FakeNccl::Entered {
 public:
  explicit Entered(FakeNccl& nccl) : nccl_(nccl) {
    if (++nccl_.callers_ > 1) nccl_.Forbid("two threads are in NCCL at a time");
  }
  ~Entered() { --nccl_.callers_; }

 private:
  FakeNccl& nccl_;
};

FakeNccl::FakeNccl(std::shared_ptr<FakeNcclWorld> world, const Options& options)
    : world_(std::move(world)), options_(options) {}

FakeNccl::~FakeNccl() = default;

std::vector<NcclCall> FakeNccl::calls() const {
  std::lock_guard lock(mutex_);
  return calls_;
}

int FakeNccl::Count(const std::string& name) const {
  std::lock_guard lock(mutex_);
  return static_cast<int>(std::count_if(calls_.begin(), calls_.end(),
                                        [&](const NcclCall& call) { return call.name == name; }));
}

std::vector<std::string> FakeNccl::Violations() const {
  std::lock_guard lock(mutex_);
  std::vector<std::string> all = violations_;
  if (depth_ != 0) all.push_back(absl::StrCat(depth_, " groups are open"));
  for (const auto& comm : comms_) {
    if (!comm->freed) all.push_back(absl::StrCat("rank ", comm->rank, " is left"));
  }
  return all;
}

void FakeNccl::Record(const char* name, int peer, int64_t bytes) {
  std::lock_guard lock(mutex_);
  calls_.push_back({name, peer, bytes, depth_});
}

void FakeNccl::Forbid(const std::string& what) {
  std::lock_guard lock(mutex_);
  violations_.push_back(what);
}

void FakeNccl::CheckUsable(NcclComm* comm, const char* call) {
  std::lock_guard lock(mutex_);
  if (comm->freed) violations_.push_back(absl::StrCat(call, " of a communicator that is gone"));
  if (comm->pending != nullptr || comm->splitting != nullptr || comm->settling > 0)
    violations_.push_back(absl::StrCat(call, " while in progress"));
}

std::unique_ptr<NcclComm> FakeNccl::Join(const std::string& id, const NcclConfig& config) {
  auto made = std::make_unique<NcclComm>();
  made->clique = world_->Join(id, config.size);
  made->id = id;
  made->rank = config.rank;
  made->size = config.size;
  made->shares = config.shares;
  return made;
}

NcclResult FakeNccl::GetUniqueId(std::string* id) {
  Record("GetUniqueId");
  *id = world_->NewId();
  return NcclResult::kSuccess;
}

NcclResult FakeNccl::CommInit(const NcclConfig& config, NcclComm** comm) {
  const Entered entered(*this);
  Record("CommInit");
  if (injected_ != NcclResult::kSuccess) return injected_;
  std::unique_ptr<NcclComm> made = Join(config.unique_id, config);
  *comm = made.get();
  std::lock_guard lock(mutex_);
  comms_.push_back(std::move(made));
  return NcclResult::kInProgress;
}

NcclResult FakeNccl::CommSplit(NcclComm* whole, int colour, const NcclConfig& config,
                               NcclComm** part) {
  const Entered entered(*this);
  CheckUsable(whole, "CommSplit");
  Record("CommSplit");
  std::unique_ptr<NcclComm> made =
      Join(absl::StrCat(whole->id, ", split ", whole->splits++, ", colour ", colour), config);
  std::lock_guard lock(mutex_);
  made->settling = options_.looks_in_progress;
  if (!whole->shares) violations_.push_back("CommSplit of a communicator that does not share");
  whole->splitting = made.get();
  whole->split_to = part;
  comms_.push_back(std::move(made));
  return NcclResult::kInProgress;
}

NcclResult FakeNccl::AsyncError(NcclComm* comm, NcclResult* error) {
  ++num_looks_;
  *error = injected_;
  if (*error != NcclResult::kSuccess) return NcclResult::kSuccess;
  std::lock_guard lock(mutex_);
  if (comm->freed) violations_.push_back("AsyncError of a communicator that is gone");
  Clique& clique = *comm->clique;
  {
    std::lock_guard inner(clique.mutex);
    bool waits = clique.joined < comm->size;
    if (comm->splitting != nullptr) {
      std::lock_guard of_part(comm->splitting->clique->mutex);
      if (comm->splitting->clique->joined < comm->splitting->size) {
        waits = true;
      } else {
        *comm->split_to = std::exchange(comm->splitting, nullptr);
      }
    }
    for (int rank = 0; rank < comm->size && comm->finalizing; ++rank)
      waits |= !clique.aborted[rank] && !clique.finalized[rank];
    if (waits) *error = NcclResult::kInProgress;
  }
  if (comm->settling > 0) {
    --comm->settling;
    *error = NcclResult::kInProgress;
  }
  if (comm->pending == nullptr) return NcclResult::kSuccess;
  if (--comm->looks_left > 0) {
    *error = NcclResult::kInProgress;
    return NcclResult::kSuccess;
  }
  const auto transfer = std::static_pointer_cast<Transfer>(std::exchange(comm->pending, nullptr));
  const auto held = comm->clique;
  const int rank = comm->rank;
  const int64_t group = comm->groups;
  comm->stream->Submit([=](kernels::ExecContext&) {
    for (const Transfer::Local& copy : transfer->copies) {
      if (copy.to != copy.from) std::memmove(copy.to, copy.from, copy.bytes);
    }
    std::unique_lock inner(held->mutex);
    std::map<std::pair<int, int>, int> index;
    std::vector<Key> own;
    for (const Transfer::Message& send : transfer->sends) {
      own.push_back({group, send.kind, rank, send.peer, index[{send.kind, send.peer}]++});
      held->offers[own.back()] = {send.data, send.bytes};
    }
    held->news.notify_all();
    index.clear();
    for (const Transfer::Message& receive : transfer->receives) {
      const Key key{group, receive.kind, receive.peer, rank, index[{receive.kind, receive.peer}]++};
      const auto here = [&] {
        const auto offer = held->offers.find(key);
        return offer != held->offers.end() && offer->second.bytes == receive.bytes;
      };
      held->news.wait(inner, [&] { return held->aborted[rank] || here(); });
      if (held->aborted[rank]) break;
      Offer& offer = held->offers.at(key);
      std::memcpy(receive.data, offer.data, offer.bytes);
      offer.taken = true;
      held->news.notify_all();
    }
    for (const Key& key : own) {
      held->news.wait(inner, [&] { return held->aborted[rank] || held->offers.at(key).taken; });
      held->offers.erase(key);
    }
    return absl::OkStatus();
  });
  return NcclResult::kSuccess;
}

std::string FakeNccl::LastError(NcclComm*) { return "told by the fake"; }

NcclResult FakeNccl::CommAbort(NcclComm* comm) {
  Record("CommAbort");
  std::lock_guard lock(mutex_);
  if (comm->freed) violations_.push_back("CommAbort of a communicator that is gone");
  comm->freed = true;
  std::lock_guard inner(comm->clique->mutex);
  comm->clique->aborted[comm->rank] = true;
  comm->clique->news.notify_all();
  return NcclResult::kSuccess;
}

NcclResult FakeNccl::CommFinalize(NcclComm* comm) {
  const Entered entered(*this);
  CheckUsable(comm, "CommFinalize");
  Record("CommFinalize");
  std::lock_guard lock(mutex_);
  if (depth_ != 0) violations_.push_back("CommFinalize in a group");
  comm->finalizing = true;
  std::lock_guard inner(comm->clique->mutex);
  comm->clique->finalized[comm->rank] = true;
  return NcclResult::kInProgress;
}

NcclResult FakeNccl::CommDestroy(NcclComm* comm) {
  const Entered entered(*this);
  CheckUsable(comm, "CommDestroy");
  Record("CommDestroy");
  std::lock_guard lock(mutex_);
  if (!comm->finalizing) violations_.push_back("CommDestroy before CommFinalize");
  comm->freed = true;
  return NcclResult::kSuccess;
}

NcclResult FakeNccl::GroupStart() {
  const Entered entered(*this);
  {
    std::lock_guard lock(mutex_);
    ++depth_;
    if (depth_ > 1) violations_.push_back("a group in a group");
  }
  Record("GroupStart");
  return NcclResult::kSuccess;
}

NcclResult FakeNccl::GroupEnd() {
  const Entered entered(*this);
  Record("GroupEnd");
  std::lock_guard lock(mutex_);
  if (--depth_ < 0) violations_.push_back("GroupEnd without GroupStart");
  if (depth_ != 0) return NcclResult::kSuccess;
  NcclResult result = NcclResult::kSuccess;
  for (const auto& comm : comms_) {
    ++comm->groups;
    if (comm->open == nullptr) continue;
    comm->pending = std::exchange(comm->open, nullptr);
    comm->looks_left = options_.looks_in_progress;
    result = NcclResult::kInProgress;
  }
  return result;
}

NcclResult FakeNccl::Add(const char* name, Transfer transfer, NcclComm* comm,
                         kernels::Stream& stream) {
  CheckUsable(comm, name);
  const NcclResult planned = next_call_.exchange(NcclResult::kSuccess);
  if (planned != NcclResult::kSuccess) return planned;
  std::lock_guard lock(mutex_);
  if (depth_ == 0) violations_.push_back(absl::StrCat(name, " outside a group"));
  if (comm->open == nullptr) comm->open = std::make_shared<Transfer>();
  static_cast<Transfer*>(comm->open.get())->Append(transfer);
  comm->stream = &stream;
  return NcclResult::kSuccess;
}

NcclResult FakeNccl::Send(const void* data, int64_t bytes, int peer, NcclComm* comm,
                          kernels::Stream& stream) {
  const Entered entered(*this);
  Record("Send", peer, bytes);
  Transfer transfer;
  transfer.sends.push_back(
      {Transfer::kPointToPoint, peer, static_cast<char*>(const_cast<void*>(data)), bytes});
  return Add("Send", std::move(transfer), comm, stream);
}

NcclResult FakeNccl::Recv(void* data, int64_t bytes, int peer, NcclComm* comm,
                          kernels::Stream& stream) {
  const Entered entered(*this);
  Record("Recv", peer, bytes);
  Transfer transfer;
  transfer.receives.push_back({Transfer::kPointToPoint, peer, static_cast<char*>(data), bytes});
  return Add("Recv", std::move(transfer), comm, stream);
}

NcclResult FakeNccl::AllGather(const void* send, void* receive, int64_t bytes, NcclComm* comm,
                               kernels::Stream& stream) {
  const Entered entered(*this);
  Record("AllGather", -1, bytes);
  auto* const out = static_cast<char*>(receive);
  auto* const own = static_cast<char*>(const_cast<void*>(send));
  Transfer transfer;
  for (int peer = 0; peer < comm->size; ++peer) {
    if (peer == comm->rank) {
      transfer.copies.push_back({out + peer * bytes, own, bytes});
      continue;
    }
    transfer.sends.push_back({Transfer::kAllGather, peer, own, bytes});
    transfer.receives.push_back({Transfer::kAllGather, peer, out + peer * bytes, bytes});
  }
  return Add("AllGather", std::move(transfer), comm, stream);
}

}  // namespace upipe::comm
