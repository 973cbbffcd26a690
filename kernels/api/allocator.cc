// Best-fit over offsets. The space above the highest live block counts as an endless block, taken
// only when no hole fits: addresses then do not depend on the arena's size, so dry and real runs
// agree.
#include "kernels/api/allocator.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/rounding.h"

namespace upipe::kernels {
namespace {

// Part of free space that one Release gave back, with the point its stream had reached.
struct FreedPiece {
  int64_t end = 0;
  const Stream* stream = nullptr;  // identity only; may be gone, its work is then done
  Event event;
  uint64_t sequence = 0;  // releases in host order
};

}  // namespace

struct Allocator::State {
  Options options;
  // Owned by the host thread that drives the rank.
  std::map<int64_t, int64_t> hole_sizes;        // offset -> bytes, no two adjacent
  std::set<std::pair<int64_t, int64_t>> holes;  // (bytes, offset)
  int64_t top = 0;                              // end of the highest live block
  int64_t live_bytes = 0;                       // with padding
  int64_t live_buffers = 0;                     // empty ones included
  std::map<int64_t, FreedPiece> freed;          // begin -> piece, disjoint, in free space
  uint64_t releases = 0;
  // Read from any thread.
  mutable std::mutex mutex;
  MemoryStats stats;
  std::string moment;

  void AddHole(int64_t offset, int64_t bytes) {
    hole_sizes[offset] = bytes;
    holes.insert({bytes, offset});
  }
  void RemoveHole(std::map<int64_t, int64_t>::iterator hole) {
    holes.erase({hole->second, hole->first});
    hole_sizes.erase(hole);
  }
  int64_t Take(int64_t bytes);
  void GiveBack(int64_t offset, int64_t bytes);
  int64_t LargestBlock() const;
  void AwaitFreedPieces(int64_t begin, int64_t end, Stream& stream);
  void CountAllocation(MemoryTag tag, int64_t bytes, int64_t block_end);
  void CountRelease(MemoryTag tag, int64_t bytes);
};

// Offset of a block of `bytes` (a multiple of the alignment), or -1 when none fits.
int64_t Allocator::State::Take(int64_t bytes) {
  const auto fit = holes.lower_bound({bytes, 0});
  if (fit == holes.end()) {
    if (bytes > options.arena_bytes - top) return -1;
    return std::exchange(top, top + bytes);
  }
  const auto [hole_bytes, offset] = *fit;
  RemoveHole(hole_sizes.find(offset));
  if (hole_bytes > bytes) AddHole(offset + bytes, hole_bytes - bytes);
  return offset;
}

void Allocator::State::GiveBack(int64_t offset, int64_t bytes) {
  int64_t end = offset + bytes;
  auto next = hole_sizes.lower_bound(offset);
  if (next != hole_sizes.end() && next->first == end) {
    end += next->second;
    RemoveHole(next++);
  }
  if (next != hole_sizes.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      offset = previous->first;
      RemoveHole(previous);
    }
  }
  if (end == top) {
    top = offset;
  } else {
    AddHole(offset, end - offset);
  }
}

int64_t Allocator::State::LargestBlock() const {
  const int64_t above = options.arena_bytes - top;
  return holes.empty() ? above : std::max(above, holes.rbegin()->first);
}

// Takes [begin, end) out of `freed`; `stream` waits once per other stream that freed part of it.
void Allocator::State::AwaitFreedPieces(int64_t begin, int64_t end, Stream& stream) {
  std::vector<FreedPiece> latest;  // one per stream, in order of offset
  auto piece = freed.upper_bound(begin);
  if (piece != freed.begin()) --piece;
  while (piece != freed.end() && piece->first < end) {
    const auto current = piece++;
    const int64_t piece_begin = current->first;
    FreedPiece taken = current->second;
    if (taken.end <= begin) continue;
    freed.erase(current);
    if (piece_begin < begin) {
      freed[piece_begin] = taken;
      freed[piece_begin].end = begin;
    }
    if (taken.end > end) freed[end] = taken;
    if (taken.stream == &stream) continue;
    const auto same = std::find_if(latest.begin(), latest.end(), [&](const FreedPiece& other) {
      return other.stream == taken.stream;
    });
    if (same == latest.end()) {
      latest.push_back(std::move(taken));
    } else if (same->sequence < taken.sequence) {
      *same = std::move(taken);
    }
  }
  for (const FreedPiece& other : latest) stream.Wait(other.event);
}

void Allocator::State::CountAllocation(MemoryTag tag, int64_t bytes, int64_t block_end) {
  std::lock_guard lock(mutex);
  const int index = static_cast<int>(tag);
  stats.current_bytes[index] += bytes;
  stats.current_total_bytes += bytes;
  stats.peak_bytes[index] = std::max(stats.peak_bytes[index], stats.current_bytes[index]);
  stats.arena_high_water_bytes = std::max(stats.arena_high_water_bytes, block_end);
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
    const int64_t offset = fits_arena ? state.Take(block_bytes) : -1;
    if (offset < 0) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "device arena exhausted: ", NameOf(tag), " asked for ", bytes, " bytes, ",
          state.options.arena_bytes - state.live_bytes, " of ", state.options.arena_bytes,
          " are free, largest free block ", state.LargestBlock(),
          "; the arena never grows: give the rank more memory, or shorten the context or tiles"));
    }
    state.AwaitFreedPieces(offset, offset + block_bytes, stream);
    state.live_bytes += block_bytes;
    state.CountAllocation(tag, bytes, offset + block_bytes);
    buffer.data_ = static_cast<char*>(state.options.base) + offset;
    buffer.offset_ = offset;
  }
  ++state.live_buffers;
  buffer.allocator_ = this;
  buffer.size_bytes_ = bytes;
  buffer.tag_ = tag;
  buffer.stream_ = &stream;
  return buffer;
}

void Allocator::Release(Buffer& buffer) {
  State& state = *state_;
  --state.live_buffers;
  if (buffer.size_bytes_ == 0) return;
  const int64_t block_bytes = RoundUp(buffer.size_bytes_, kAlignmentBytes);
  if (state.options.poison_freed) {
    buffer.stream_->Submit([data = buffer.data_, block_bytes](ExecContext&) {
      std::memset(data, 0xFF, static_cast<size_t>(block_bytes));
      return absl::OkStatus();
    });
  }
  state.freed[buffer.offset_] = {buffer.offset_ + block_bytes, buffer.stream_,
                                 buffer.stream_->Record(), ++state.releases};
  state.GiveBack(buffer.offset_, block_bytes);
  state.live_bytes -= block_bytes;
  state.CountRelease(buffer.tag_, buffer.size_bytes_);
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

int64_t Allocator::arena_bytes() const { return state_->options.arena_bytes; }

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
