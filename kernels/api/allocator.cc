// Best-fit over offsets. Free space below the highest byte handed out is a list of ranges, each
// with the stream that freed it last; a stream reuses its own ranges, and otherwise takes space
// that nobody has used since the last Settle. Neither depends on the arena's size, so dry and real
// runs agree.
#include "kernels/api/allocator.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/rounding.h"

namespace upipe::kernels {
namespace {

// A range of free space that one stream gave back, with the latest point it had reached. Adjacent
// ranges of one stream are one.
struct FreeRange {
  int64_t begin = 0;
  int64_t end = 0;
  const Stream* stream = nullptr;  // identity only; null = nobody's, since Settle
  Event event;
  uint64_t sequence = 0;  // releases in host order
};

}  // namespace

struct Allocator::State {
  Options options;
  // Owned by the host thread that drives the rank.
  std::vector<FreeRange> free;  // ascending, disjoint, below `touched`
  int64_t touched = 0;          // end of the highest block handed out since Settle, or live then
  int64_t live_bytes = 0;       // with padding
  int64_t live_buffers = 0;     // empty ones included
  uint64_t releases = 0;
  AllocatorObserver* observer = nullptr;
  // Read from any thread.
  mutable std::mutex mutex;
  MemoryStats stats;
  std::string moment;

  // The first free range that begins at `offset` or above.
  std::vector<FreeRange>::iterator LowerBound(int64_t offset) {
    return std::lower_bound(
        free.begin(), free.end(), offset,
        [](const FreeRange& range, int64_t begin) { return range.begin < begin; });
  }
  int64_t Find(int64_t bytes, const Stream* owner) const;
  void TakeRange(int64_t begin, int64_t end, Stream& stream);
  void GiveBack(FreeRange range);
  int64_t LargestBlock() const;
  void CountAllocation(MemoryTag tag, int64_t bytes);
  void CountRelease(MemoryTag tag, int64_t bytes);
};

// Offset of the smallest gapless free space that holds `bytes`, the lowest of equals, or -1: of
// what `owner` freed and what is nobody's, or of all when null. The space at the end, with all that
// lies above `touched`, counts as endless: it is taken only when nothing else fits.
int64_t Allocator::State::Find(int64_t bytes, const Stream* owner) const {
  int64_t best = -1;
  int64_t best_bytes = 0;
  int64_t run_begin = 0;
  int64_t run_end = -1;  // no run
  const auto consider_run = [&] {
    const int64_t run_bytes = run_end - run_begin;
    if (run_end < 0 || run_bytes < bytes || (best >= 0 && run_bytes >= best_bytes)) return;
    best = run_begin;
    best_bytes = run_bytes;
  };
  for (const FreeRange& range : free) {
    if (owner != nullptr && range.stream != nullptr && range.stream != owner) continue;
    if (range.begin != run_end) {
      consider_run();
      run_begin = range.begin;
    }
    run_end = range.end;
  }
  int64_t last_begin = touched;
  if (run_end == touched) {
    last_begin = run_begin;
  } else {
    consider_run();
  }
  if (best >= 0) return best;
  return bytes <= options.arena_bytes - last_begin ? last_begin : -1;
}

// Makes [begin, end) live; `stream` waits once per other stream that freed part of it.
void Allocator::State::TakeRange(int64_t begin, int64_t end, Stream& stream) {
  std::vector<FreeRange> latest;  // one per stream, in order of offset
  // Blocks begin where a range does, or where nobody was.
  auto range = LowerBound(begin);
  while (range != free.end() && range->begin < end) {
    const FreeRange taken = *range;
    if (taken.end > end) {
      range->begin = end;
    } else {
      range = free.erase(range);
    }
    if (taken.stream == nullptr || taken.stream == &stream) continue;
    const auto same = std::find_if(latest.begin(), latest.end(), [&](const FreeRange& other) {
      return other.stream == taken.stream;
    });
    if (same == latest.end()) {
      latest.push_back(taken);
    } else if (same->sequence < taken.sequence) {
      *same = taken;
    }
  }
  for (const FreeRange& other : latest) stream.Wait(other.event);
  touched = std::max(touched, end);
}

// The range was freed last of all, so its event stands for what it joins.
void Allocator::State::GiveBack(FreeRange range) {
  auto next = LowerBound(range.begin);
  if (next != free.end() && next->begin == range.end && next->stream == range.stream) {
    range.end = next->end;
    next = free.erase(next);
  }
  if (next != free.begin()) {
    FreeRange& previous = *std::prev(next);
    if (previous.end == range.begin && previous.stream == range.stream) {
      range.begin = previous.begin;
      previous = std::move(range);
      return;
    }
  }
  free.insert(next, std::move(range));
}

int64_t Allocator::State::LargestBlock() const {
  int64_t largest = 0;
  int64_t run_begin = touched;
  int64_t run_end = -1;
  for (const FreeRange& range : free) {
    if (range.begin != run_end) run_begin = range.begin;
    run_end = range.end;
    largest = std::max(largest, run_end - run_begin);
  }
  return std::max(largest, options.arena_bytes - (run_end == touched ? run_begin : touched));
}

void Allocator::State::CountAllocation(MemoryTag tag, int64_t bytes) {
  std::lock_guard lock(mutex);
  const int index = static_cast<int>(tag);
  stats.current_bytes[index] += bytes;
  stats.current_total_bytes += bytes;
  stats.peak_bytes[index] = std::max(stats.peak_bytes[index], stats.current_bytes[index]);
  stats.arena_high_water_bytes = std::max(stats.arena_high_water_bytes, touched);
  if (IsAttention(tag)) {
    int64_t attention_bytes = 0;
    for (int i = 0; i < kNumMemoryTags; ++i) {
      if (IsAttention(static_cast<MemoryTag>(i))) attention_bytes += stats.current_bytes[i];
    }
    stats.attention_peak_bytes = std::max(stats.attention_peak_bytes, attention_bytes);
  }
  if (stats.current_total_bytes > stats.peak_total_bytes) {
    stats.peak_total_bytes = stats.current_total_bytes;
    stats.at_peak_bytes = stats.current_bytes;
    stats.peak_moment = moment;
  }
}

void Allocator::State::CountRelease(MemoryTag tag, int64_t bytes) {
  std::lock_guard lock(mutex);
  stats.current_bytes[static_cast<int>(tag)] -= bytes;
  stats.current_total_bytes -= bytes;
}

Allocator::Allocator(const Options& options) : state_(std::make_unique<State>()) {
  UPIPE_CHECK(reinterpret_cast<uintptr_t>(options.base) % kAlignmentBytes == 0)
      << "arena base " << options.base << " is not " << kAlignmentBytes << "-byte aligned";
  UPIPE_CHECK(options.arena_bytes >= 0) << "arena_bytes = " << options.arena_bytes;
  state_->options = options;
}

Allocator::~Allocator() {
  UPIPE_CHECK(state_->live_buffers == 0)
      << state_->live_buffers << " buffers outlive their allocator ("
      << state_->stats.current_total_bytes << " bytes)";
}

absl::StatusOr<Buffer> Allocator::Allocate(MemoryTag tag, int64_t bytes, Stream& stream) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("allocation of ", bytes, " bytes for ", NameOf(tag)));
  }
  State& state = *state_;
  Buffer buffer;
  if (bytes > 0) {
    const bool fits_arena = bytes <= state.options.arena_bytes;
    const int64_t block_bytes = fits_arena ? RoundUp(bytes, Allocator::kAlignmentBytes) : bytes;
    int64_t offset = fits_arena ? state.Find(block_bytes, &stream) : -1;
    if (offset < 0 && fits_arena) offset = state.Find(block_bytes, nullptr);
    if (offset < 0) {
      return absl::ResourceExhaustedError(absl::StrCat(
          state.options.name, " arena exhausted: ", NameOf(tag), " asked for ", bytes, " bytes, ",
          state.options.arena_bytes - state.live_bytes, " of ", state.options.arena_bytes,
          " are free, largest free block ", state.LargestBlock(),
          "; the arena never grows: give the rank more memory, or shorten the context or tiles"));
    }
    state.TakeRange(offset, offset + block_bytes, stream);
    state.live_bytes += block_bytes;
    state.CountAllocation(tag, bytes);
    buffer.data_ = static_cast<char*>(state.options.base) + offset;
    buffer.offset_ = offset;
    if (state.observer != nullptr) state.observer->OnAllocate(tag, bytes, offset, stream);
  }
  ++state.live_buffers;
  buffer.allocator_ = this;
  buffer.size_bytes_ = bytes;
  buffer.tag_ = tag;
  buffer.stream_ = &stream;
  return buffer;
}

void Allocator::PoisonOnHost(void* block, int64_t bytes, Stream& stream) {
  stream.Submit([block, bytes](ExecContext&) {
    std::memset(block, kPoisonByte, static_cast<size_t>(bytes));
    return absl::OkStatus();
  });
}

void Allocator::Release(Buffer& buffer) {
  State& state = *state_;
  --state.live_buffers;
  if (buffer.size_bytes_ == 0) return;
  const int64_t block_bytes = RoundUp(buffer.size_bytes_, kAlignmentBytes);
  if (state.options.poison) state.options.poison(buffer.data_, block_bytes, *buffer.stream_);
  state.GiveBack({.begin = buffer.offset_,
                  .end = buffer.offset_ + block_bytes,
                  .stream = buffer.stream_,
                  .event = buffer.stream_->Record(),
                  .sequence = ++state.releases});
  state.live_bytes -= block_bytes;
  state.CountRelease(buffer.tag_, buffer.size_bytes_);
  if (state.observer != nullptr) {
    state.observer->OnRelease(buffer.tag_, buffer.size_bytes_, buffer.offset_);
  }
}

void Allocator::Settle() {
  State& state = *state_;
  std::vector<FreeRange> nobodys;
  for (const FreeRange& range : state.free) {
    if (!nobodys.empty() && nobodys.back().end == range.begin) {
      nobodys.back().end = range.end;
    } else {
      nobodys.push_back({.begin = range.begin, .end = range.end});
    }
  }
  if (!nobodys.empty() && nobodys.back().end == state.touched) {
    state.touched = nobodys.back().begin;
    nobodys.pop_back();
  }
  state.free = std::move(nobodys);
  if (state.observer != nullptr) state.observer->OnSettle();
}

MemoryStats Allocator::stats() const {
  std::lock_guard lock(state_->mutex);
  return state_->stats;
}

void Allocator::ResetPeaks() {
  std::lock_guard lock(state_->mutex);
  MemoryStats& stats = state_->stats;
  stats.peak_bytes = stats.current_bytes;
  stats.at_peak_bytes = stats.current_bytes;
  stats.peak_total_bytes = stats.current_total_bytes;
  stats.attention_peak_bytes = 0;
  for (int i = 0; i < kNumMemoryTags; ++i) {
    if (IsAttention(static_cast<MemoryTag>(i)))
      stats.attention_peak_bytes += stats.current_bytes[i];
  }
  stats.peak_moment = state_->moment;
}

void Allocator::set_moment(std::string moment) {
  std::lock_guard lock(state_->mutex);
  state_->moment = std::move(moment);
}

std::string Allocator::moment() const {
  std::lock_guard lock(state_->mutex);
  return state_->moment;
}

int64_t Allocator::arena_bytes() const { return state_->options.arena_bytes; }

void Allocator::set_observer(AllocatorObserver* observer) { state_->observer = observer; }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this == &other) return *this;
  Free();
  allocator_ = std::exchange(other.allocator_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  offset_ = std::exchange(other.offset_, 0);
  tag_ = other.tag_;
  stream_ = std::exchange(other.stream_, nullptr);
  return *this;
}

void Buffer::Free() {
  if (allocator_ == nullptr) return;
  allocator_->Release(*this);
  allocator_ = nullptr;
  data_ = nullptr;
  size_bytes_ = 0;
  offset_ = 0;
  stream_ = nullptr;
}

}  // namespace upipe::kernels
