// The loop threads: every index once, the same pieces whoever runs them, several callers at once.
#include "kernels/host/host_parallel_for.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace upipe::kernels {
namespace {

using Pieces = std::map<int, std::pair<int64_t, int64_t>>;  // thread index -> [begin, end)

Pieces PiecesOf(HostParallelFor& parallel, int64_t count) {
  std::vector<std::pair<int64_t, int64_t>> by_thread(parallel.num_threads(), {-1, -1});
  parallel.Run(count, [&](int64_t begin, int64_t end, int thread_index) {
    by_thread[thread_index] = {begin, end};
  });
  Pieces pieces;
  for (int i = 0; i < parallel.num_threads(); ++i) {
    if (by_thread[i].first >= 0) pieces[i] = by_thread[i];
  }
  return pieces;
}

TEST(HostParallelFor, PiecesCoverTheRangeAndDependOnCountAndThreadsOnly) {
  for (const int num_threads : {1, 2, 3, 5}) {
    HostParallelFor parallel(num_threads, {});
    EXPECT_EQ(parallel.num_threads(), num_threads);
    for (const int64_t count : {0, 1, 2, 3, 7, 100}) {
      const Pieces pieces = PiecesOf(parallel, count);
      EXPECT_EQ(static_cast<int64_t>(pieces.size()), std::min<int64_t>(count, num_threads));
      int64_t next = 0;
      for (const auto& [thread_index, piece] : pieces) {
        EXPECT_EQ(piece.first, next);
        EXPECT_GT(piece.second, piece.first);
        next = piece.second;
      }
      EXPECT_EQ(next, count);
      for (int again = 0; again < 20; ++again) EXPECT_EQ(PiecesOf(parallel, count), pieces);
    }
  }
}

TEST(HostParallelFor, OneThreadRunsInline) {
  HostParallelFor parallel(1, {});
  std::thread::id id;
  parallel.Run(10, [&](int64_t, int64_t, int) { id = std::this_thread::get_id(); });
  EXPECT_EQ(id, std::this_thread::get_id());
}

TEST(HostParallelFor, ThePiecesRunOnDifferentThreads) {
  HostParallelFor parallel(3, {});
  std::vector<std::thread::id> ids(3);
  parallel.Run(3, [&](int64_t, int64_t, int i) { ids[i] = std::this_thread::get_id(); });
  EXPECT_EQ(ids[0], std::this_thread::get_id());
  EXPECT_NE(ids[0], ids[1]);
  EXPECT_NE(ids[1], ids[2]);
}

TEST(HostParallelFor, SeveralCallersAtOnceEachGetTheirWholeLoop) {
  HostParallelFor parallel(3, {});
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 300; ++round) {
        std::vector<int> seen(50, 0);
        parallel.Run(50, [&](int64_t begin, int64_t end, int) {
          for (int64_t i = begin; i < end; ++i) ++seen[i];
        });
        for (const int times : seen) wrong += times != 1;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace upipe::kernels
