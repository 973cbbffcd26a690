// Colours of all pictures, as CSS variables: one hue for each family of memory (model state blue,
// hidden stream green, attention orange, the rest violet and grey), lightness for its members;
// chosen apart for light and dark backgrounds.
#pragma once

namespace upipe::chart {

inline constexpr char kPalette[] = R"css(
:root {
  --page: #f6f6f3; --card: #ffffff; --ink: #1b1c1d; --soft: #5c5f63; --faint: #e7e7e2;
  --rule: #c9c9c3;
  --train: #2a6fbb; --held-out: #d2601a; --unigram: #6d6f73; --bigram: #8a6bbd; --rate: #1f8a70;
  --good: #1a7f4e; --bad: #b3261e;
  --evaluation-1: #f0cdb2; --evaluation-2: #e8a97c; --evaluation-3: #df854b;
  --evaluation-4: #d2601a;
  --weights: #1f4e8c; --gradients: #4a80c4; --optimizer: #97bce6; --residual: #3b9c83;
  --attn_q: #7c2d06; --attn_kv: #b4490f; --attn_exchange: #d97024; --attn_out: #ee9c55;
  --attn_grad: #f8c795;
  --mlp: #7a5bb0; --logits: #a78fd1; --comm: #9a9da1; --workspace: #c4c6c8; --checkpoint: #6fa3a8;
  --upipe: #d2601a; --upipe-plan: #f2b488; --ulysses: #5f6c7b; --ulysses-plan: #a9b3bf;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #131416; --card: #1c1e21; --ink: #ececea; --soft: #a2a5a9; --faint: #2c2f33;
    --rule: #484c52;
    --train: #6ba7ea; --held-out: #f2914f; --unigram: #a2a5a9; --bigram: #b79ce4; --rate: #52c4a5;
    --good: #57c98c; --bad: #f2867d;
    --evaluation-1: #6b452c; --evaluation-2: #99603b; --evaluation-3: #c67a48;
    --evaluation-4: #f2914f;
    --weights: #3f77bd; --gradients: #6b9fdf; --optimizer: #a5c8f0; --residual: #4cb497;
    --attn_q: #a8430f; --attn_kv: #cb5f1d; --attn_exchange: #e67f35; --attn_out: #f2a463;
    --attn_grad: #f9ca9b;
    --mlp: #9a7fce; --logits: #bda9e2; --comm: #84888d; --workspace: #5f6369; --checkpoint: #3f7f86;
    --upipe: #f2914f; --upipe-plan: #8f5a36; --ulysses: #a9b3bf; --ulysses-plan: #5b6470;
  }
}
)css";

}  // namespace upipe::chart
