#include "planner/recording.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status.h"
#include "kernels/backends.h"

namespace upipe::planner {
namespace {

using kernels::MemoryTag;
using Kind = RecordedEvent::Kind;

class Recorder final : public DryRunObserver {
 public:
  Recorder(int64_t group_layers, StreamNames& streams)
      : group_layers_(group_layers), streams_(streams), device_(*this, false), host_(*this, true) {}

  void Start(const Subject& subject) override {
    subject_.emplace(subject);
    subject.device.allocator().set_observer(&device_);
    subject.device.host_allocator().set_observer(&host_);
    fragments_.emplace_back();
  }

  void Finish() override {
    Close();
    subject_->device.allocator().set_observer(nullptr);
    subject_->device.host_allocator().set_observer(nullptr);
  }

  void Begin(const engine::Moment& moment) override {
    const int group =
        moment.layer < 0 ? Fragment::kNoGroup : static_cast<int>(moment.layer / group_layers_);
    if (const Fragment& now = fragments_.back(); moment.pass != now.pass || group != now.group) {
      Cut({.round = now.round, .pass = moment.pass, .group = group});
    }
    ForgetTouched();
    fragments_.back().events.push_back({.kind = Kind::kMark, .moment = moment});
  }

  std::vector<Fragment> fragments() && { return std::move(fragments_); }

 private:
  // Scratch that was taken and given back at once since the pool was last asked for anything else.
  struct Touch {
    MemoryTag tag;
    int64_t bytes;
    bool operator==(const Touch&) const = default;
  };

  class Pool final : public kernels::AllocatorObserver {
   public:
    Pool(Recorder& recorder, bool host) : recorder_(recorder), host_(host) {}

    void OnAllocate(MemoryTag tag, int64_t bytes, int64_t offset,
                    const kernels::Stream& stream) override {
      alive_.push_back(offset);
      Events().push_back({.kind = Kind::kAllocate,
                          .host = host_,
                          .tag = tag,
                          .bytes = bytes,
                          .stream = recorder_.IndexOf(stream)});
    }

    void OnRelease(MemoryTag tag, int64_t bytes, int64_t offset) override {
      const auto found = std::find(alive_.rbegin(), alive_.rend(), offset);
      UPIPE_CHECK(found != alive_.rend()) << "offset " << offset << " was never handed out";
      const int64_t younger = found - alive_.rbegin();
      alive_.erase(std::next(found).base());
      const std::vector<RecordedEvent>& events = Events();
      const bool touch = younger == 0 && !events.empty() && events.back().kind == Kind::kAllocate &&
                         events.back().host == host_;
      if (touch && IsRepeated({tag, bytes}, events.back().stream)) {
        Events().pop_back();
        return;
      }
      Events().push_back(
          {.kind = Kind::kRelease, .host = host_, .tag = tag, .bytes = bytes, .younger = younger});
    }

    void OnSettle() override {
      if (!host_) recorder_.BeginRound();
      Events().push_back({.kind = Kind::kSettle, .host = host_});
    }

    void ForgetTouched() { touched_.clear(); }

   private:
    std::vector<RecordedEvent>& Events() const { return recorder_.fragments_.back().events; }

    // The same scratch again, for the same stream and with nothing in between but such scratch,
    // gets the same place and leaves the pool as it is: it need not be written down twice.
    bool IsRepeated(const Touch& touch, int stream) {
      if (stream != touched_by_ || !NothingSince()) touched_.clear();
      touched_by_ = stream;
      const bool repeated = std::find(touched_.begin(), touched_.end(), touch) != touched_.end();
      if (!repeated) touched_.push_back(touch);
      asked_at_ = Events().size() + (repeated ? -1 : 1);
      return repeated;
    }
    // The allocation of the touch itself aside.
    bool NothingSince() const { return Events().size() == asked_at_ + 1; }

    Recorder& recorder_;
    const bool host_;
    std::vector<int64_t> alive_;  // offsets, oldest first
    std::vector<Touch> touched_;
    int touched_by_ = -1;  // stream
    size_t asked_at_ = 0;  // events there were after the last touch
  };

  void ForgetTouched() {
    device_.ForgetTouched();
    host_.ForgetTouched();
  }

  void BeginRound() {
    ForgetTouched();
    Cut({.round = fragments_.back().round + 1});
  }

  void Cut(Fragment next) {
    Close();
    fragments_.push_back(std::move(next));
    before_ = subject_->counts;
    sent_before_ = subject_->comm.stats().bytes_sent_to_peer;
  }

  // Counts what the last fragment did.
  void Close() {
    Fragment& last = fragments_.back();
    if (last.round == kAllocationRound) return;
    last.counts = subject_->counts;
    last.counts.AddTimes(before_, -1);
    last.bytes_sent_to_peer = subject_->comm.stats().bytes_sent_to_peer;
    for (size_t peer = 0; peer < sent_before_.size(); ++peer) {
      last.bytes_sent_to_peer[peer] -= sent_before_[peer];
    }
  }

  int IndexOf(const kernels::Stream& stream) {
    const auto known = stream_indices_.find(&stream);
    if (known != stream_indices_.end()) return known->second;
    std::string name = stream.name();
    name.erase(name.find_last_not_of("0123456789") + 1);
    const auto found = std::find(streams_.begin(), streams_.end(), name);
    const int index = static_cast<int>(found - streams_.begin());
    if (found == streams_.end()) streams_.push_back(std::move(name));
    return stream_indices_[&stream] = index;
  }

  const int64_t group_layers_;
  StreamNames& streams_;
  std::map<const kernels::Stream*, int> stream_indices_;
  Pool device_, host_;
  std::optional<Subject> subject_;
  std::vector<Fragment> fragments_;
  StepCounts before_;  // the last fragment
  std::vector<int64_t> sent_before_;
};

// What is alive of one pool while events pass, oldest first. Item has tag() and bytes().
template <typename Item>
class Alive {
 public:
  void Add(Item item) { items_.push_back(std::move(item)); }

  absl::StatusOr<Item> Take(const RecordedEvent& event) {
    const auto count = static_cast<int64_t>(items_.size());
    if (event.younger >= count) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the buffer below ", event.younger, " others is released, ", count, " are alive"));
    }
    const auto released = items_.begin() + (count - 1 - event.younger);
    if (released->tag != event.tag || released->bytes() != event.bytes) {
      return absl::FailedPreconditionError(
          absl::StrCat("a release of ", event.bytes, " bytes of ", NameOf(event.tag), " finds ",
                       released->bytes(), " of ", NameOf(released->tag)));
    }
    Item item = std::move(*released);
    items_.erase(released);
    return item;
  }

 private:
  std::vector<Item> items_;
};

// One pool while a recording is played to it.
class Player {
 public:
  Player(kernels::Allocator& allocator,
         const std::vector<std::unique_ptr<kernels::Stream>>& streams)
      : allocator_(allocator), streams_(streams) {}

  absl::Status Play(const RecordedEvent& event) {
    switch (event.kind) {
      case Kind::kAllocate: {
        UPIPE_ASSIGN_OR_RETURN(
            kernels::Buffer buffer,
            allocator_.Allocate(event.tag, event.bytes, *streams_[event.stream]));
        alive_.Add({std::move(buffer), event.tag});
        return absl::OkStatus();
      }
      case Kind::kRelease:
        return alive_.Take(event).status();
      case Kind::kSettle:
        allocator_.Settle();
        return absl::OkStatus();
      case Kind::kMark:
        return absl::OkStatus();
    }
    return absl::OkStatus();
  }

 private:
  struct Block {
    kernels::Buffer buffer;
    MemoryTag tag;
    int64_t bytes() const { return buffer.size_bytes(); }
  };

  kernels::Allocator& allocator_;
  const std::vector<std::unique_ptr<kernels::Stream>>& streams_;
  Alive<Block> alive_;
};

// One pool while the most that it holds is looked for.
class PeakFinder {
 public:
  void Enter(const engine::Moment& moment) {
    peak_ = &peaks_[{moment.pass, moment.stage}];
    for (size_t tag = 0; tag < now_.size(); ++tag) Raise(tag);
  }

  // `touch`: of scratch that one operation takes and gives back.
  absl::Status See(const RecordedEvent& event, bool touch) {
    const auto tag = static_cast<size_t>(event.tag);
    if (event.kind == Kind::kAllocate) {
      alive_.Add({event.tag, event.bytes});
      if (touch) {
        AddScratch(event.bytes);
      } else {
        now_[tag] += event.bytes;
        Raise(tag);
      }
      return absl::OkStatus();
    }
    if (event.kind != Kind::kRelease) return absl::OkStatus();
    UPIPE_RETURN_IF_ERROR(alive_.Take(event).status());
    if (!touch) now_[tag] -= event.bytes;
    return absl::OkStatus();
  }

  MomentPeaks peaks() && { return std::move(peaks_); }

 private:
  struct Block {
    MemoryTag tag;
    int64_t size = 0;
    int64_t bytes() const { return size; }
  };

  void Raise(size_t tag) {
    if (peak_ != nullptr) peak_->held_bytes[tag] = std::max(peak_->held_bytes[tag], now_[tag]);
  }
  void AddScratch(int64_t bytes) {
    if (peak_ == nullptr) return;
    std::vector<int64_t>& sizes = peak_->scratch_bytes;
    if (std::find(sizes.begin(), sizes.end(), bytes) == sizes.end()) sizes.push_back(bytes);
  }

  Alive<Block> alive_;
  kernels::TagBytes now_ = {};
  MomentPeak* peak_ = nullptr;
  MomentPeaks peaks_;
};

// That event `i` and the next, or the last and it, are scratch of one operation.
bool IsTouch(const std::vector<RecordedEvent>& events, size_t i) {
  if (events[i].kind != Kind::kAllocate && i == 0) return false;
  const size_t first = events[i].kind == Kind::kAllocate ? i : i - 1;
  if (first + 1 >= events.size()) return false;
  const RecordedEvent &taken = events[first], &given = events[first + 1];
  return taken.kind == Kind::kAllocate && given.kind == Kind::kRelease &&
         taken.host == given.host && given.younger == 0;
}

bool IsOfStep(const Fragment& fragment, const v1::RunPlan& plan) {
  const int64_t evaluation_round =
      kFirstMicroStepRound + plan.spec().train().gradient_accumulation();
  return fragment.round != kAllocationRound && fragment.round < evaluation_round;
}

}  // namespace

absl::StatusOr<Recording> Record(const v1::RunPlan& plan, int rank,
                                 const std::string& attention_kernel, int64_t group_layers,
                                 StreamNames& streams) {
  Recorder recorder(group_layers, streams);
  Recording recording;
  UPIPE_ASSIGN_OR_RETURN(recording.result, DryRunRank(plan, rank, attention_kernel, &recorder));
  recording.fragments = std::move(recorder).fragments();
  return recording;
}

absl::StatusOr<Outline> OutlineOf(const std::vector<Played>& fragments, const v1::RunPlan& plan) {
  Outline outline;
  PeakFinder device, host;
  for (const Played& played : fragments) {
    const std::vector<RecordedEvent>& events = played.fragment->events;
    for (size_t i = 0; i < events.size(); ++i) {
      if (events[i].kind == Kind::kMark) {
        device.Enter(events[i].moment);
        host.Enter(events[i].moment);
        continue;
      }
      UPIPE_RETURN_IF_ERROR((events[i].host ? host : device).See(events[i], IsTouch(events, i)));
    }
    if (IsOfStep(*played.fragment, plan)) {
      outline.counts.AddTimes(played.fragment->counts, played.times);
    }
  }
  outline.device = std::move(device).peaks();
  outline.host = std::move(host).peaks();
  return outline;
}

absl::StatusOr<RankDryRun> Play(const std::vector<Played>& fragments, const v1::RunPlan& plan,
                                int rank, const StreamNames& streams) {
  // Any backend's: only its pools are used.
  UPIPE_ASSIGN_OR_RETURN(auto device, kernels::CreateDryDevice("reference"));
  std::vector<std::unique_ptr<kernels::Stream>> made;
  for (const std::string& name : streams) made.push_back(device->CreateStream(name));
  Player on_device(device->allocator(), made), on_host(device->host_allocator(), made);
  RankDryRun result;
  std::vector<int64_t> sent(plan.spec().parallel().ranks(), 0);
  for (const Played& played : fragments) {
    const Fragment& fragment = *played.fragment;
    for (const RecordedEvent& event : fragment.events) {
      if (event.kind == Kind::kMark) {
        engine::Moment at = event.moment;
        if (at.layer >= 0) at.layer += static_cast<int>(played.layers_later);
        const std::string moment = NameOf(at);
        device->host_allocator().set_moment(moment);
        device->allocator().set_moment(moment);
        continue;
      }
      UPIPE_RETURN_IF_ERROR((event.host ? on_host : on_device).Play(event));
    }
    if (!IsOfStep(fragment, plan)) continue;
    result.counts.AddTimes(fragment.counts, played.times);
    for (size_t peer = 0; peer < sent.size(); ++peer) {
      sent[peer] += played.times * fragment.bytes_sent_to_peer[peer];
    }
  }
  result.rank = ToRankPlan(rank, *device, sent, result.counts);
  return result;
}

}  // namespace upipe::planner
