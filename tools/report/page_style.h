// The report's style sheet. Colours: one hue for each family of memory (model state blue, hidden
// stream green, attention orange, the rest violet and grey), lightness for its members; chosen
// apart for light and dark backgrounds.
#pragma once

namespace upipe::report {

inline constexpr char kPageStyle[] = R"css(
:root {
  color-scheme: light dark;
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
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 56px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em; }
h2 { font-size: 16px; margin: 0 0 2px; }
p { margin: 0 0 10px; color: var(--soft); max-width: 78ch; }
.card p { font-size: 13.5px; max-width: 110ch; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 14px; margin: 22px 0 14px; }
.tile, .card { background: var(--card); border: 1px solid var(--faint); border-radius: 10px; }
.tile { padding: 14px 16px; }
.tile .name { font-size: 12.5px; color: var(--soft); }
.tile .value { font-size: 25px; font-weight: 600; letter-spacing: -0.02em; line-height: 1.35; }
.tile .note { font-size: 12.5px; color: var(--soft); line-height: 1.4; }
.good { color: var(--good); } .bad { color: var(--bad); }
.grid { display: grid; grid-template-columns: 1fr 1fr; gap: 14px; }
.card { padding: 18px 18px 10px; min-width: 0; }
.wide { grid-column: 1 / -1; }
svg { width: 100%; height: auto; display: block; overflow: visible; }
svg text { font: 11.5px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--soft);
  font-variant-numeric: tabular-nums; }
svg text.side, svg text.strong { fill: var(--ink); }
svg text.small { font-size: 11px; }
svg .grid { stroke: var(--faint); } svg .axis { stroke: var(--rule); } svg .section {
  stroke: var(--rule); stroke-dasharray: 2 3; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .level { stroke-width: 1.5; stroke-dasharray: 5 4; }
svg .marker { stroke: var(--card); stroke-width: 2; }
svg .band { stroke: var(--card); stroke-width: 0.5; }
svg .hover { fill: transparent; } svg .hover:hover { fill: var(--ink); fill-opacity: 0.07; }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 12.5px; color: var(--soft);
  margin: 2px 0 8px; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
table { width: 100%; border-collapse: collapse; font-size: 13.5px; margin: 6px 0 10px;
  font-variant-numeric: tabular-nums; }
td, th { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--faint); text-align: left;
  vertical-align: top; font-weight: 400; }
tr:last-child td { border-bottom: 0; }
thead th { color: var(--soft); font-size: 12.5px; }
td.name { color: var(--soft); white-space: nowrap; width: 1%; }
td.n, th.n { text-align: right; }
code { font: 12.5px ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
@media (max-width: 860px) { .tiles { grid-template-columns: 1fr 1fr; } .grid {
  grid-template-columns: minmax(0, 1fr); } }
)css";

}  // namespace upipe::report
