// The collectives of the ranks of a job: the only way ranks talk during training. One host thread
// per rank issues all collectives, in one total order equal on every rank. Each operation is
// ordered on the stream it is given: it starts when that stream reaches it and later work of that
// stream waits for it; other streams go on.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kernels/api/device.h"
#include "kernels/api/stream.h"

namespace upipe::comm {

// One message to or from `peer` (the own rank included: a local copy).
struct Block {
  int peer = 0;
  void* data = nullptr;
  int64_t bytes = 0;
};

// Any number of blocks per peer; the i-th send of rank a to rank b meets the i-th receive of b from
// a and must have its size. Both sides derive the lists from the schedule; zero-byte blocks are
// skipped on both sides. Sends may alias each other; receives may not alias anything.
struct AllToAllVParams {
  std::vector<Block> sends;
  std::vector<Block> receives;
  bool ring = false;  // keys, values or their gradients round the ring: counted apart
};

enum class ReduceOp { kSum, kMax };

enum class CommOperation : uint8_t {
  kAllToAll,
  kRing,  // an all-to-all that carries keys and values round the ring
  kAllGather,
  kReduceScatter,
  kAllReduce,
  kBarrier
};
inline constexpr int kNumCommOperations = 6;
// "all-to-all".
const char* NameOf(CommOperation operation);

// Bytes and calls are counted when an operation is issued, so they equal the dry run's.
struct CommStats {
  struct Use {
    int64_t bytes_sent = 0;  // to all others together
    int64_t calls = 0;
    double seconds = 0;  // time the operations ran, waiting for peers included
  };
  std::vector<int64_t> bytes_sent_to_peer;  // [size]; the own rank stays 0
  std::array<Use, kNumCommOperations> by_operation = {};

  const Use& Of(CommOperation operation) const {
    return by_operation[static_cast<size_t>(operation)];
  }
  Use& Of(CommOperation operation) { return by_operation[static_cast<size_t>(operation)]; }
  int64_t num_collectives() const;
  double seconds() const;
};

// Ranks that take part in a collective of a part of the whole: ascending, the caller among them.
// The groups of one collective are disjoint and of equal size: every rank of the whole issues it,
// each with its own group.
using RankGroup = std::vector<int>;
// [0, size).
RankGroup AllRanks(int size);

// Dead after its first error: later calls return it, the streams they were given carry it. Blocks
// of memory stay the caller's and must live until the stream passes the operation. Issued by one
// thread; Abort from any.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  virtual absl::Status AllToAllV(const AllToAllVParams& params, kernels::Stream& stream) = 0;

  // Every rank of the whole, [0, size()).
  const RankGroup& everyone() const { return everyone_; }

  // receive[i] = send of the group's i-th rank. receive holds group.size() * bytes. send may be
  // this rank's part of receive.
  virtual absl::Status AllGather(const RankGroup& group, const void* send, void* receive,
                                 int64_t bytes, kernels::Stream& stream) = 0;

  // receive[i] = sum over the group's ranks, in ascending order, of that rank's send[index * count
  // + i], index being this rank's in the group. fp32. Sends travel to their owner directly:
  // (group.size() - 1) * count * 4 bytes leave each rank. scratch:
  // ReduceScatterScratchBytes(group.size(), count) bytes.
  virtual absl::Status ReduceScatter(const RankGroup& group, const float* send, float* receive,
                                     int64_t count, void* scratch, kernels::Stream& stream) = 0;
  virtual int64_t ReduceScatterScratchBytes(int group_size, int64_t count) const = 0;

  // In place over `count` fp64 values, ascending rank order, the same bits on every rank. For a few
  // scalars. scratch: AllReduceScratchBytes(count) bytes.
  virtual absl::Status AllReduce(double* values, int64_t count, ReduceOp op, void* scratch,
                                 kernels::Stream& stream) = 0;
  virtual int64_t AllReduceScratchBytes(int64_t count) const = 0;

  virtual absl::Status Barrier(kernels::Stream& stream) = 0;

  // Ends every operation in flight, here and (where the transport can tell them) at the peers, with
  // `cause`.
  virtual void Abort(absl::Status cause) = 0;
  virtual absl::Status status() const = 0;
  virtual CommStats stats() const = 0;

 protected:
  explicit Communicator(int size);

 private:
  const RankGroup everyone_;
};

// Called on the communicator's own thread as operations begin and end: feeds the position page.
struct CollectiveObserver {
  std::function<void(int64_t collective_number)> entered;
  std::function<void(int64_t collective_number)> left;
};

// What a reduce-scatter has scratch for: contributions of `pieces` ranks at a time, `piece_bytes`
// of each. The same on every rank, and in the plan that counts it.
struct ReduceRoom {
  int64_t piece_bytes = int64_t{1} << 20;
  int pieces = 2;
};
// Of a device's links it takes more to outweigh what starting a group of messages costs.
inline constexpr ReduceRoom kDeviceReduceRoom = {.piece_bytes = int64_t{4} << 20, .pieces = 8};
// By the backend of a job.
ReduceRoom ReduceRoomOf(const std::string& backend);

struct CommOptions {
  absl::Duration deadline =
      absl::Minutes(2);  // of one operation, from its start; then the communicator is dead
  CollectiveObserver observer;
  // This rank's group of each way in which the ranks are cut into groups that will gather; every
  // rank names as many. A transport may get ready for them; others gather all the same.
  std::vector<RankGroup> parts;
  ReduceRoom reduce_room = {};
};

// Compares `value` (a schedule or plan hash) over all ranks and blocks until known.
// FailedPrecondition naming the ranks that differ from rank 0, on every rank. Gathers through
// `scratch`: memory of `device`, size() * 8 bytes.
absl::Status VerifySameOnAllRanks(Communicator& comm, uint64_t value, const char* what,
                                  void* scratch, kernels::Device& device, kernels::Stream& stream);

}  // namespace upipe::comm
