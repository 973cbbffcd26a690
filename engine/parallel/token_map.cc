#include "engine/parallel/token_map.h"

#include "common/check.h"

namespace upipe::parallel {

TokenMap TokenMap::Make(int64_t context, int ranks) {
  UPIPE_CHECK(context > 0 && ranks > 0) << context << " tokens on " << ranks << " ranks";
  const int64_t tokens_per_rank = (context + ranks - 1) / ranks;
  return {context, tokens_per_rank * ranks, ranks, tokens_per_rank};
}

kernels::AttentionMask TokenMap::Mask() const {
  auto starts = std::make_shared<std::vector<int64_t>>(1, 0);
  if (padded_context > context) starts->push_back(context);
  kernels::AttentionMask mask;
  mask.causal = true;
  mask.document_starts = std::move(starts);
  mask.total = padded_context;
  return mask;
}

}  // namespace upipe::parallel
