#include "planner/in_threads.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "common/status.h"

namespace upipe::planner {

absl::Status InThreads(int num_threads, size_t count,
                       const std::function<absl::Status(size_t index)>& run) {
  std::vector<absl::Status> outcomes(count);
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < count; i = next++) outcomes[i] = run(i);
  };
  std::vector<std::thread> threads;
  for (size_t i = 1; i < std::min(static_cast<size_t>(std::max(num_threads, 1)), count); ++i) {
    threads.emplace_back(work);
  }
  work();
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& outcome : outcomes) UPIPE_RETURN_IF_ERROR(outcome);
  return absl::OkStatus();
}

}  // namespace upipe::planner
