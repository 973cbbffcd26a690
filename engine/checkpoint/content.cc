#include "engine/checkpoint/content.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/sha256.h"
#include "common/status.h"

namespace upipe::checkpoint {
namespace {

constexpr v1::ValueKind kKinds[] = {v1::VALUE_KIND_WEIGHT, v1::VALUE_KIND_FIRST_MOMENT,
                                    v1::VALUE_KIND_SECOND_MOMENT};

int64_t EndOf(const v1::ShardPiece& piece) { return piece.offset() + piece.count(); }

}  // namespace

int64_t NumElements(const v1::TensorExtent& tensor) {
  int64_t elements = 1;
  for (const int64_t dim : tensor.shape()) elements *= dim;
  return elements;
}

absl::StatusOr<Content> Content::Create(
    const google::protobuf::RepeatedPtrField<v1::TensorExtent>& tensors,
    std::vector<ShardFile> shards) {
  Content content;
  content.shards_ = std::move(shards);
  for (const v1::TensorExtent& tensor : tensors) content.tensors_[tensor.name()] = tensor;
  for (const ShardFile& shard : content.shards_) {
    for (const v1::ShardPiece& piece : shard.index().pieces()) {
      if (!content.tensors_.contains(piece.tensor())) {
        return absl::DataLossError(absl::StrCat("a shard holds ",
                                                Describe(piece.kind(), piece.tensor()),
                                                ", which is no tensor of the manifest"));
      }
      content.places_[{piece.tensor(), piece.kind()}].push_back({&shard, &piece});
    }
  }
  for (const auto& [name, tensor] : content.tensors_) {
    for (const v1::ValueKind kind : kKinds) {
      Places& places = content.places_[{name, kind}];
      std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
        return a.piece->offset() < b.piece->offset();
      });
      int64_t at = 0;
      const bool in_a_row = std::all_of(places.begin(), places.end(), [&](const Place& place) {
        return place.piece->offset() == std::exchange(at, EndOf(*place.piece));
      });
      if (in_a_row && at == NumElements(tensor)) continue;
      return absl::DataLossError(absl::StrCat("the shards do not hold the ", Describe(kind, name),
                                              ", ", NumElements(tensor),
                                              " elements, exactly once: wrong from element ", at));
    }
  }
  return content;
}

absl::StatusOr<std::string> Content::TensorSum(const Places& places) const {
  Sha256 sum;
  std::vector<float> block;
  size_t first = 0;
  const int64_t end = EndOf(*places.back().piece);
  for (int64_t begin = 0; begin < end; begin += kBlockElements) {
    const int64_t until = std::min(end, begin + kBlockElements);
    while (EndOf(*places[first].piece) <= begin) ++first;
    const v1::ShardPiece& piece = *places[first].piece;
    if (EndOf(piece) >= until) {  // one shard has all of it, and its sum
      const int64_t index = begin / kBlockElements - piece.offset() / kBlockElements;
      sum.Update(absl::string_view(piece.block_sums()).substr(index * kSumBytes, kSumBytes));
      continue;
    }
    block.resize(until - begin);
    for (size_t at = first; at < places.size() && places[at].piece->offset() < until; ++at) {
      const v1::ShardPiece& part = *places[at].piece;
      const int64_t from = std::max(begin, part.offset());
      UPIPE_RETURN_IF_ERROR(places[at].shard->Read(part, from, std::min(until, EndOf(part)),
                                                   block.data() + from - begin));
    }
    Sha256 whole;
    whole.Update({reinterpret_cast<const char*>(block.data()), block.size() * sizeof(float)});
    sum.Update(whole.Digest());
  }
  return sum.Digest();
}

absl::StatusOr<std::string> Content::Sum(const v1::TrainingState& state) const {
  Sha256 sum;
  sum.Update(absl::StrCat("upipe checkpoint content 1\nstep ", state.step(), " applied ",
                          state.applied_steps(), " skipped ", state.skipped_steps(), " ",
                          state.skipped_in_a_row(), " seed ", state.seed(), " context ",
                          state.context(), " sequences ", state.sequences_per_step(), "\n"));
  for (const auto& [name, tensor] : tensors_) {
    for (const v1::ValueKind kind : kKinds) {
      UPIPE_ASSIGN_OR_RETURN(const std::string values, TensorSum(places_.at({name, kind})));
      sum.Update(absl::StrCat(Describe(kind, name), " [", absl::StrJoin(tensor.shape(), ","), "] ",
                              values, "\n"));
    }
  }
  return sum.Hex();
}

absl::Status Content::Read(const std::string& tensor, v1::ValueKind kind, int64_t offset,
                           int64_t count, float* to) const {
  const auto found = places_.find({tensor, kind});
  UPIPE_CHECK(found != places_.end()) << "no " << Describe(kind, tensor);
  for (const Place& place : found->second) {
    const int64_t begin = std::max(offset, place.piece->offset());
    const int64_t end = std::min(offset + count, EndOf(*place.piece));
    if (begin >= end) continue;
    UPIPE_RETURN_IF_ERROR(place.shard->Read(*place.piece, begin, end, to + begin - offset));
  }
  return absl::OkStatus();
}

absl::Status Content::Verify() const {
  for (const ShardFile& shard : shards_) UPIPE_RETURN_IF_ERROR(shard.Verify());
  return absl::OkStatus();
}

}  // namespace upipe::checkpoint
