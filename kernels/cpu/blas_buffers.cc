#include "kernels/cpu/blas_buffers.h"

#include <algorithm>
#include <mutex>
#include <vector>

// Exported by OpenBLAS but in none of its headers: what every product calls first and last.
extern "C" {
void* blas_memory_alloc(int position);
void blas_memory_free(void* buffer);
}

namespace upipe::kernels::cpu {
namespace {

constexpr int kMostBuffers =
    128;  // OpenBLAS ends the process when it runs out of places, at 256 or more

std::mutex mutex;
int callers_alive = 0;

// Holding that many at once makes OpenBLAS map them; given back, they stay mapped and are taken
// first.
void MapBuffers(int count) {
  std::vector<void*> buffers(count);
  for (void*& buffer : buffers) buffer = blas_memory_alloc(0);
  for (void* buffer : buffers) blas_memory_free(buffer);
}

}  // namespace

BlasBuffers::BlasBuffers(int callers) : callers_(std::clamp(callers, 0, kMostBuffers)) {
  const std::lock_guard lock(mutex);
  callers_alive += callers_;
  MapBuffers(std::min(callers_alive, kMostBuffers));
}

BlasBuffers::~BlasBuffers() {
  const std::lock_guard lock(mutex);
  callers_alive -= callers_;
}

}  // namespace upipe::kernels::cpu
