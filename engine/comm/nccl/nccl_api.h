// The calls of NCCL that the communicator makes, as one small table: the library fills it where
// there is one (nccl_library), a recording fake does for tests. Declared here and not by <nccl.h>,
// so that the communicator is built and tested on machines without NCCL.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/api/stream.h"

namespace upipe::comm {

// NCCL's own numbers.
enum class NcclResult {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};
const char* NameOf(NcclResult result);

// One rank's end of a communicator, made by NCCL.
struct NcclComm;

inline constexpr int kNcclIdBytes = 128;

struct NcclConfig {
  int size = 1;
  int rank = 0;
  std::string unique_id;  // kNcclIdBytes
  // Blocks of threads that move data: no fewer and no more, so that the same plan moves it the same
  // way everywhere.
  int channels = 16;
};

// Sizes are bytes. Every communicator is non-blocking: a call may return kInProgress, and nothing
// else may be called with it until AsyncError has ended that; Abort may always. All calls but Abort
// and AsyncError come from one thread at a time.
class NcclApi {
 public:
  virtual ~NcclApi() = default;
  // NCCL's version code, 22809 for 2.28.9.
  virtual int Version() = 0;
  virtual NcclResult GetUniqueId(std::string* id) = 0;
  virtual NcclResult CommInit(const NcclConfig& config, NcclComm** comm) = 0;
  virtual NcclResult AsyncError(NcclComm* comm, NcclResult* error) = 0;
  // What NCCL has to say about its last error.
  virtual std::string LastError(NcclComm* comm) = 0;
  // Ends what is in flight and frees.
  virtual NcclResult CommAbort(NcclComm* comm) = 0;
  // Flushes, with all ranks; then CommDestroy frees.
  virtual NcclResult CommFinalize(NcclComm* comm) = 0;
  virtual NcclResult CommDestroy(NcclComm* comm) = 0;

  // What is called between the two starts together, once the group has ended.
  virtual NcclResult GroupStart() = 0;
  virtual NcclResult GroupEnd() = 0;
  // The i-th send of a to b meets the i-th receive of b from a. `stream` is one of the CommDevice
  // that belongs to this table.
  virtual NcclResult Send(const void* data, int64_t bytes, int peer, NcclComm* comm,
                          kernels::Stream& stream) = 0;
  virtual NcclResult Recv(void* data, int64_t bytes, int peer, NcclComm* comm,
                          kernels::Stream& stream) = 0;
  virtual NcclResult AllGather(const void* send, void* receive, int64_t bytes, NcclComm* comm,
                               kernels::Stream& stream) = 0;
};

}  // namespace upipe::comm
