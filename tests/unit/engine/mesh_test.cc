// Axes of the mesh: coordinates and back, and the group of ranks along every axis.
#include "engine/parallel/mesh.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace upipe::parallel {
namespace {

std::vector<Mesh> AllMeshes() {
  std::vector<Mesh> all;
  for (int dp = 1; dp <= 3; ++dp) {
    for (int fsdp = 1; fsdp <= 3; ++fsdp) {
      for (int ring = 1; ring <= 3; ++ring) {
        for (int ulysses = 1; ulysses <= 3; ++ulysses) all.push_back({dp, fsdp, ring, ulysses});
      }
    }
  }
  return all;
}

TEST(Mesh, RanksCountTheUlyssesAxisFirst) {
  for (const Mesh& mesh : AllMeshes()) {
    int rank = 0;
    for (int dp = 0; dp < mesh.dp_ranks; ++dp) {
      for (int fsdp = 0; fsdp < mesh.fsdp_ranks; ++fsdp) {
        for (int ring = 0; ring < mesh.ring_ranks; ++ring) {
          for (int ulysses = 0; ulysses < mesh.ulysses_ranks; ++ulysses, ++rank) {
            const Coordinates at = mesh.Of(rank);
            EXPECT_EQ(at.dp, dp);
            EXPECT_EQ(at.fsdp, fsdp);
            EXPECT_EQ(at.ring, ring);
            EXPECT_EQ(at.ulysses, ulysses);
            EXPECT_EQ(mesh.RankAt(at), rank);
            EXPECT_EQ(mesh.ContextRank(rank), ring * mesh.ulysses_ranks + ulysses);
            EXPECT_EQ(mesh.SequenceGroup(rank), dp * mesh.fsdp_ranks + fsdp);
          }
        }
      }
    }
    EXPECT_EQ(rank, mesh.num_ranks());
  }
}

// By comparing coordinates: a second way to say what a group is.
template <typename Same>
std::vector<int> RanksLike(const Mesh& mesh, int rank, Same same) {
  std::vector<int> ranks;
  for (int other = 0; other < mesh.num_ranks(); ++other) {
    if (same(mesh.Of(rank), mesh.Of(other))) ranks.push_back(other);
  }
  return ranks;
}

TEST(Mesh, GroupsDifferOnTheNamedAxesOnly) {
  using C = const Coordinates&;
  for (const Mesh& mesh : AllMeshes()) {
    for (int rank = 0; rank < mesh.num_ranks(); ++rank) {
      EXPECT_EQ(mesh.ShardGroup(rank),
                RanksLike(mesh, rank, [](C a, C b) { return a.dp == b.dp; }));
      EXPECT_EQ(mesh.DpGroup(rank), RanksLike(mesh, rank, [](C a, C b) {
                  return a.fsdp == b.fsdp && a.ring == b.ring && a.ulysses == b.ulysses;
                }));
      EXPECT_EQ(mesh.RingGroup(rank), RanksLike(mesh, rank, [](C a, C b) {
                  return a.dp == b.dp && a.fsdp == b.fsdp && a.ulysses == b.ulysses;
                }));
      EXPECT_EQ(mesh.UlyssesGroup(rank), RanksLike(mesh, rank, [](C a, C b) {
                  return a.dp == b.dp && a.fsdp == b.fsdp && a.ring == b.ring;
                }));
      for (const auto& group : {mesh.ShardGroup(rank), mesh.DpGroup(rank), mesh.RingGroup(rank),
                                mesh.UlyssesGroup(rank)}) {
        EXPECT_EQ(std::count(group.begin(), group.end(), rank), 1);
        EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
      }
    }
  }
}

v1::ParallelSpec Spec(v1::Method method, int ranks, int dp, int fsdp) {
  v1::ParallelSpec spec;
  spec.set_method(method);
  spec.set_ranks(ranks);
  spec.set_dp_ranks(dp);
  spec.set_fsdp_ranks(fsdp);
  return spec;
}

TEST(Mesh, OfASpecDividesTheContextRanks) {
  const Mesh ulysses = Mesh::From(Spec(v1::METHOD_ULYSSES, 12, 2, 3));
  EXPECT_EQ(ulysses.dp_ranks, 2);
  EXPECT_EQ(ulysses.fsdp_ranks, 3);
  EXPECT_EQ(ulysses.ring_ranks, 1);
  EXPECT_EQ(ulysses.ulysses_ranks, 2);

  const Mesh ring = Mesh::From(Spec(v1::METHOD_RING, 8, 1, 2));
  EXPECT_EQ(ring.ring_ranks, 4);
  EXPECT_EQ(ring.ulysses_ranks, 1);

  v1::ParallelSpec spec = Spec(v1::METHOD_USP, 8, 1, 1);
  spec.set_ring_ranks(2);
  const Mesh usp = Mesh::From(spec);
  EXPECT_EQ(usp.ring_ranks, 2);
  EXPECT_EQ(usp.ulysses_ranks, 4);
  EXPECT_EQ(usp.context_ranks(), 8);

  v1::ParallelSpec bare;
  bare.set_ranks(5);
  bare.set_method(v1::METHOD_UPIPE);
  const Mesh upipe = Mesh::From(bare);
  EXPECT_EQ(upipe.ulysses_ranks, 5);
  EXPECT_EQ(upipe.num_ranks(), 5);
}

}  // namespace
}  // namespace upipe::parallel
