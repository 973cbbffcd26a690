#include "engine/parallel/mesh.h"

#include "common/check.h"

namespace upipe::parallel {
namespace {

// `count` ranks from `first` on, `stride` apart.
std::vector<int> Every(int first, int stride, int count) {
  std::vector<int> ranks;
  ranks.reserve(count);
  for (int i = 0; i < count; ++i) ranks.push_back(first + i * stride);
  return ranks;
}

}  // namespace

Mesh Mesh::From(const v1::ParallelSpec& spec) {
  Mesh mesh;
  mesh.dp_ranks = spec.has_dp_ranks() ? spec.dp_ranks() : 1;
  mesh.fsdp_ranks = spec.has_fsdp_ranks() ? spec.fsdp_ranks() : 1;
  const int context_ranks = spec.ranks() / (mesh.dp_ranks * mesh.fsdp_ranks);
  if (spec.method() == v1::METHOD_RING) {
    mesh.ring_ranks = context_ranks;
  } else if (spec.has_ring_ranks()) {
    mesh.ring_ranks = spec.ring_ranks();
  }
  mesh.ulysses_ranks = context_ranks / mesh.ring_ranks;
  UPIPE_CHECK(mesh.ulysses_ranks >= 1 && mesh.num_ranks() == spec.ranks())
      << mesh.dp_ranks << " dp x " << mesh.fsdp_ranks << " fsdp x " << mesh.ring_ranks << " ring x "
      << mesh.ulysses_ranks << " ulysses ranks are not the " << spec.ranks() << " ranks of the job";
  return mesh;
}

Coordinates Mesh::Of(int rank) const {
  UPIPE_CHECK(rank >= 0 && rank < num_ranks()) << "rank " << rank << " of " << num_ranks();
  return {.dp = rank / shard_ranks(),
          .fsdp = rank / context_ranks() % fsdp_ranks,
          .ring = rank / ulysses_ranks % ring_ranks,
          .ulysses = rank % ulysses_ranks};
}

int Mesh::RankAt(const Coordinates& at) const {
  return ((at.dp * fsdp_ranks + at.fsdp) * ring_ranks + at.ring) * ulysses_ranks + at.ulysses;
}

std::vector<int> Mesh::ShardGroup(int rank) const {
  return Every(rank / shard_ranks() * shard_ranks(), 1, shard_ranks());
}

std::vector<int> Mesh::DpGroup(int rank) const {
  return Every(rank % shard_ranks(), shard_ranks(), dp_ranks);
}

std::vector<int> Mesh::RingGroup(int rank) const {
  return Every(rank / context_ranks() * context_ranks() + rank % ulysses_ranks, ulysses_ranks,
               ring_ranks);
}

std::vector<int> Mesh::UlyssesGroup(int rank) const {
  return Every(rank / ulysses_ranks * ulysses_ranks, 1, ulysses_ranks);
}

}  // namespace upipe::parallel
