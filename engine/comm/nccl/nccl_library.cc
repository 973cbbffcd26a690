#include "engine/comm/nccl/nccl_library.h"

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstring>
#include <functional>

#include "common/check.h"
#include "kernels/cuda/cuda_stream.h"

namespace upipe::comm {
namespace {

static_assert(static_cast<int>(NcclResult::kUnhandledCudaError) == ncclUnhandledCudaError);
static_assert(static_cast<int>(NcclResult::kRemoteError) == ncclRemoteError);
static_assert(static_cast<int>(NcclResult::kInProgress) == ncclInProgress);
static_assert(kNcclIdBytes == NCCL_UNIQUE_ID_BYTES);

NcclResult Result(ncclResult_t result) { return static_cast<NcclResult>(result); }
ncclComm_t Handle(NcclComm* comm) { return reinterpret_cast<ncclComm_t>(comm); }

// What NCCL says is told by the caller; the stream only has to know that it got work.
NcclResult On(kernels::Stream& stream, const char* what,
              const std::function<ncclResult_t(cudaStream_t)>& call) {
  ncclResult_t result = ncclSuccess;
  kernels::CudaStream::Of(stream).Issue(what, [&](cudaStream_t handle) {
    result = call(handle);
    return absl::OkStatus();
  });
  return Result(result);
}

class LibraryNccl final : public NcclApi {
 public:
  int Version() override {
    int version = 0;
    UPIPE_CHECK(ncclGetVersion(&version) == ncclSuccess) << "ncclGetVersion failed";
    return version;
  }
  NcclResult GetUniqueId(std::string* id) override {
    ncclUniqueId unique;
    const ncclResult_t result = ncclGetUniqueId(&unique);
    if (result == ncclSuccess) id->assign(unique.internal, NCCL_UNIQUE_ID_BYTES);
    return Result(result);
  }
  NcclResult CommInit(const NcclConfig& config, NcclComm** comm) override {
    UPIPE_CHECK(config.unique_id.size() == NCCL_UNIQUE_ID_BYTES) << config.unique_id.size();
    ncclUniqueId unique;
    std::memcpy(unique.internal, config.unique_id.data(), NCCL_UNIQUE_ID_BYTES);
    ncclConfig_t pinned = NCCL_CONFIG_INITIALIZER;
    pinned.blocking = 0;
    pinned.minCTAs = config.channels;
    pinned.maxCTAs = config.channels;
    ncclComm_t made = nullptr;
    const ncclResult_t result =
        ncclCommInitRankConfig(&made, config.size, unique, config.rank, &pinned);
    *comm = reinterpret_cast<NcclComm*>(made);
    return Result(result);
  }
  NcclResult AsyncError(NcclComm* comm, NcclResult* error) override {
    ncclResult_t found = ncclSuccess;
    const ncclResult_t result = ncclCommGetAsyncError(Handle(comm), &found);
    *error = Result(found);
    return Result(result);
  }
  std::string LastError(NcclComm* comm) override {
    const char* text = ncclGetLastError(Handle(comm));
    return text == nullptr ? "" : text;
  }
  NcclResult CommAbort(NcclComm* comm) override { return Result(ncclCommAbort(Handle(comm))); }
  NcclResult CommFinalize(NcclComm* comm) override {
    return Result(ncclCommFinalize(Handle(comm)));
  }
  NcclResult CommDestroy(NcclComm* comm) override { return Result(ncclCommDestroy(Handle(comm))); }

  NcclResult GroupStart() override { return Result(ncclGroupStart()); }
  NcclResult GroupEnd() override { return Result(ncclGroupEnd()); }
  NcclResult Send(const void* data, int64_t bytes, int peer, NcclComm* comm,
                  kernels::Stream& stream) override {
    return On(stream, "a send", [&](cudaStream_t handle) {
      return ncclSend(data, bytes, ncclUint8, peer, Handle(comm), handle);
    });
  }
  NcclResult Recv(void* data, int64_t bytes, int peer, NcclComm* comm,
                  kernels::Stream& stream) override {
    return On(stream, "a receive", [&](cudaStream_t handle) {
      return ncclRecv(data, bytes, ncclUint8, peer, Handle(comm), handle);
    });
  }
  NcclResult AllGather(const void* send, void* receive, int64_t bytes, NcclComm* comm,
                       kernels::Stream& stream) override {
    return On(stream, "an all-gather", [&](cudaStream_t handle) {
      return ncclAllGather(send, receive, bytes, ncclUint8, Handle(comm), handle);
    });
  }
};

}  // namespace

std::shared_ptr<NcclApi> OpenNccl() { return std::make_shared<LibraryNccl>(); }

}  // namespace upipe::comm
