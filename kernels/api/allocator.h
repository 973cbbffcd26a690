// The tagged arena allocator. Two per rank, of device and of host memory; the only source of tensor
// memory. Offsets are handed out best-fit in host order, so a dry run and a real run of the same
// step get the same offsets, the same peaks and the same high-water mark, to the byte.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/api/memory_tag.h"
#include "kernels/api/stream.h"

namespace upipe::kernels {

using TagBytes = std::array<int64_t, kNumMemoryTags>;

// Bytes as requested by callers (alignment padding is not counted, except in
// arena_high_water_bytes).
struct MemoryStats {
  TagBytes current_bytes = {};
  TagBytes peak_bytes = {};     // each tag's own peak
  TagBytes at_peak_bytes = {};  // the split at the moment of the global peak
  int64_t current_total_bytes = 0;
  int64_t peak_total_bytes = 0;
  int64_t attention_peak_bytes = 0;    // joint peak of the attn_* tags
  int64_t arena_high_water_bytes = 0;  // end of the highest block ever handed out
  std::string peak_moment;             // the allocator's moment() when the global peak was set
};

class Allocator;

// A block of memory; frees itself in host order, on the stream it was allocated for: work of
// other streams on it must have been waited for by that stream. Move-only.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer() { Free(); }
  // Frees now; no effect when empty.
  void Free();
  void* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }
  explicit operator bool() const { return allocator_ != nullptr; }

 private:
  friend class Allocator;
  Allocator* allocator_ = nullptr;
  void* data_ = nullptr;
  int64_t size_bytes_ = 0;
  int64_t offset_ = 0;
  MemoryTag tag_ = MemoryTag::kWorkspace;
  Stream* stream_ = nullptr;
};

// Is told of all that an allocator hands out and takes back, in host order, buffers of no bytes
// aside: how a dry run is recorded.
class AllocatorObserver {
 public:
  virtual ~AllocatorObserver() = default;
  virtual void OnAllocate(MemoryTag tag, int64_t bytes, int64_t offset, const Stream& stream) = 0;
  virtual void OnRelease(MemoryTag tag, int64_t bytes, int64_t offset) = 0;
  virtual void OnSettle() = 0;
};

// Not thread-safe: allocation and freeing follow the one host thread that drives the rank, which is
// what makes addresses reproducible. stats() may be read from any thread.
class Allocator {
 public:
  static constexpr int64_t kAlignmentBytes = 256;
  static constexpr unsigned char kPoisonByte = 0xFF;  // many of them are NaN in every type

  struct Options {
    std::string name = "device";  // in messages
    void* base = nullptr;  // start of the arena, kAlignmentBytes aligned; an address only when dry
    int64_t arena_bytes = 0;  // never grows; the plan's high-water mark, or "unlimited" when dry
    // Of the test device: fills a freed block on its stream with what no result may depend on.
    std::function<void(void* block, int64_t bytes, Stream& stream)> poison = nullptr;
  };
  explicit Allocator(const Options& options);
  // A `poison` for memory that the host may write.
  static void PoisonOnHost(void* block, int64_t bytes, Stream& stream);
  ~Allocator();
  Allocator(const Allocator&) = delete;

  // A block for use on `stream`: the smallest fitting hole of what this stream freed, else space
  // nobody has used, so that streams never wait for each other's memory. Only when the arena has
  // neither, space that other streams freed: `stream` is then made to wait for the events of its
  // release. An arena as large as the high-water mark of an unlimited one is never that short.
  // Streams are told apart by address: they live as long as the allocator is used. bytes = 0 gives
  // an empty, valid buffer. ResourceExhausted, naming tag, bytes asked and free, when the arena is
  // full. Blocks no longer than Stream::Wait may.
  absl::StatusOr<Buffer> Allocate(MemoryTag tag, int64_t bytes, Stream& stream);

  // Forgets which stream freed what: free space is nobody's, and what follows gets the addresses it
  // would have got the first time. Only while no stream has work left that touches this memory.
  void Settle();

  MemoryStats stats() const;
  // Forgets peaks: they restart from the current state. The high-water mark stays.
  void ResetPeaks();
  // A short label of where the step is, kept with the peak.
  void set_moment(std::string moment);
  std::string moment() const;
  int64_t arena_bytes() const;
  // Borrowed until replaced; null = nobody.
  void set_observer(AllocatorObserver* observer);

 private:
  friend class Buffer;
  void Release(Buffer& buffer);
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace upipe::kernels
