// The page's style sheet, beside those of its charts (common/chart): light and dark, phone, desk
// and paper.
#pragma once

namespace upipe::report {

inline constexpr char kPageStyle[] = R"css(
:root { color-scheme: light dark;
  --stage-projection: #2a6fbb; --stage-exchange: #e08a3c; --stage-attention: #a33d0a;
  --stage-return: #f3bd84; --stage-mlp: #7a5bb0; --stage-loss: #b7a3dc; --stage-embedding: #6fa3a8;
  --stage-weights: #1f8a70; --stage-gradients: #7cc3a6; --stage-optimizer: #97bce6;
  --stage-offload: #8b8f94; --stage-waiting: #d6d6d0; --stage-other: #c4c6c8; }
@media (prefers-color-scheme: dark) { :root {
  --stage-projection: #5b98dd; --stage-exchange: #eb9f58; --stage-attention: #cf5f23;
  --stage-return: #f6cb9c; --stage-mlp: #9a7fce; --stage-loss: #c9b9e8; --stage-embedding: #6fa3a8;
  --stage-weights: #38a98c; --stage-gradients: #8fd3b8; --stage-optimizer: #a5c8f0;
  --stage-offload: #9ca0a5; --stage-waiting: #3b3f45; --stage-other: #5f6369; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 56px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; letter-spacing: -0.01em;
  overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 2px; overflow-wrap: anywhere; }
h3 { font-size: 13.5px; margin: 12px 0 0; }
p { margin: 0 0 10px; color: var(--soft); max-width: 78ch; overflow-wrap: anywhere; }
.card p { font-size: 13.5px; max-width: 110ch; }
nav { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13.5px; margin: 10px 0 0; }
a { color: var(--train); text-decoration: none; } a:hover { text-decoration: underline; }
.tiles { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 14px;
  margin: 22px 0 14px; }
.tile, .card { background: var(--card); border: 1px solid var(--faint); border-radius: 10px; }
.tile { padding: 14px 16px; overflow-wrap: anywhere; }
.tile .name { font-size: 12.5px; color: var(--soft); }
.tile .value { font-size: 25px; font-weight: 600; letter-spacing: -0.02em; line-height: 1.35; }
.tile .note { font-size: 12.5px; color: var(--soft); line-height: 1.4; }
.good { color: var(--good); } .bad, p.bad { color: var(--bad); }
.grid { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 14px;
  grid-auto-flow: row dense; }
.card { padding: 18px 18px 12px; min-width: 0; }
.wide { grid-column: 1 / -1; }
.phone { display: none; }
.scroll { overflow-x: auto; max-width: 100%; }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 12.5px; color: var(--soft);
  margin: 2px 0 8px; }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 6px; }
table { width: 100%; border-collapse: collapse; font-size: 13.5px; margin: 6px 0 10px;
  font-variant-numeric: tabular-nums; }
td, th { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--faint); text-align: left;
  vertical-align: top; font-weight: 400; }
tr:last-child td { border-bottom: 0; }
thead th { color: var(--soft); font-size: 12.5px; }
td { overflow-wrap: anywhere; } .scroll td { overflow-wrap: normal; }
td.name { color: var(--soft); width: 22%; min-width: 84px; overflow-wrap: normal; }
td.n, th.n { text-align: right; white-space: nowrap; padding-left: 10px; }
.scroll td:last-child { max-width: 60ch; } .scroll td:last-child:not(.n) { min-width: 26ch; }
pre { margin: 6px 0 10px; padding: 12px 14px; background: var(--page); border-radius: 8px;
  overflow-x: auto; font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
footer { color: var(--soft); font-size: 12.5px; margin-top: 18px; }
@media (max-width: 860px) { .tiles { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); }
  .grid { grid-template-columns: minmax(0, 1fr); } }
@media screen and (max-width: 640px) { main { padding: 20px 12px 36px; } h1 { font-size: 22px; }
  .card { padding: 14px 12px 8px; } .tiles, .grid { gap: 10px; } .tile { padding: 10px 12px; }
  .tile .value { font-size: 20px; } .desk { display: none; } .phone { display: block; }
  td, th { padding-right: 6px; } td.n, th.n { padding-left: 6px; } table { font-size: 13px; } }
@media print { :root { --page: #fff; --card: #fff; --ink: #111; --soft: #444; --faint: #ddd;
    --rule: #999; }
  @page { margin: 12mm; } main { padding: 0; max-width: none; } nav { display: none; }
  .card, .tile { break-inside: avoid; border-color: #ccc; } .card.long { break-inside: auto; }
  .scroll, pre { overflow: visible; white-space: pre-wrap; } body { font-size: 12px; }
  body, .band, svg * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
)css";

}  // namespace upipe::report
