#include "kernels/host/host_parallel_for.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "common/check.h"
#include "kernels/host/thread_placement.h"

namespace upipe::kernels {
namespace {

constexpr auto kSpin = std::chrono::microseconds(50);

// Returns once `value` differs from `old`: polls for at most kSpin, then blocks in the kernel.
void AwaitChange(const std::atomic<uint32_t>& value, uint32_t old) {
  constexpr int kPollsBeforeYield = 20;
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  for (int polls = 0; value.load(std::memory_order_acquire) == old; ++polls) {
    if (polls < kPollsBeforeYield) continue;
    if (std::chrono::steady_clock::now() >= deadline) {
      value.wait(old, std::memory_order_acquire);
      return;
    }
    sched_yield();
  }
}

}  // namespace

HostParallelFor::HostParallelFor(int num_threads, const std::vector<int>& cpus)
    : num_threads_(num_threads) {
  UPIPE_CHECK(num_threads >= 1) << "num_threads = " << num_threads;
  for (int i = 1; i < num_threads; ++i) {
    threads_.emplace_back([this, i] { Work(i); });
    NameThread(threads_.back(), "loop-" + std::to_string(i));
    if (!cpus.empty()) PlaceThread(threads_.back(), {cpus[i % cpus.size()]});
  }
}

HostParallelFor::~HostParallelFor() {
  stop_.store(true, std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void HostParallelFor::RunPiece(int64_t count, const Body& body, int pieces, int piece) const {
  body(count * piece / pieces, count * (piece + 1) / pieces, piece);
}

void HostParallelFor::Run(int64_t count, const Body& body) {
  if (count <= 0) return;
  const int pieces = static_cast<int>(std::min<int64_t>(count, num_threads_));
  std::unique_lock pool(pool_, std::defer_lock);
  if (pieces == 1 || !pool.try_lock()) {
    for (int piece = 0; piece < pieces; ++piece) RunPiece(count, body, pieces, piece);
    return;
  }
  body_ = &body;
  count_ = count;
  pieces_ = pieces;
  pending_.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  RunPiece(count, body, pieces, 0);
  while (const uint32_t pending = pending_.load(std::memory_order_acquire)) {
    AwaitChange(pending_, pending);
  }
}

void HostParallelFor::Work(int thread_index) {
  for (uint32_t round = 0;; ++round) {
    AwaitChange(round_, round);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (thread_index < pieces_) RunPiece(count_, *body_, pieces_, thread_index);
    if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) pending_.notify_one();
  }
}

}  // namespace upipe::kernels
