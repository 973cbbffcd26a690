// The rank's loop threads. Pieces of a loop depend only on (count, num_threads), so a sum taken per
// piece has the same bits in every run.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/api/stream.h"

namespace upipe::kernels {

class HostParallelFor final : public ParallelFor {
 public:
  // num_threads >= 1 counts the calling thread, which takes piece 0. Thread i of the pool runs on
  // cpus[i % size] when any are named.
  HostParallelFor(int num_threads, const std::vector<int>& cpus);
  ~HostParallelFor() override;

  int num_threads() const override { return num_threads_; }
  // Safe to call from several streams' threads: one has the pool, the others run their pieces, the
  // same ones, on their own thread. A body must not call Run.
  void Run(int64_t count,
           const std::function<void(int64_t begin, int64_t end, int thread_index)>& body) override;

 private:
  using Body = std::function<void(int64_t, int64_t, int)>;
  void Work(int thread_index);
  void RunPiece(int64_t count, const Body& body, int pieces, int piece) const;

  const int num_threads_;
  std::mutex pool_;  // held by the caller whose loop the threads are running
  // The loop being run; published by round_, read until pending_ reaches 0.
  const Body* body_ = nullptr;
  int64_t count_ = 0;
  int pieces_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<uint32_t> round_{0};
  std::atomic<uint32_t> pending_{0};  // threads of the pool that have not finished this round
  std::vector<std::thread> threads_;
};

}  // namespace upipe::kernels
