// The report's style sheet, beside the colours that every picture shares (common/chart/palette.h).
#pragma once

namespace upipe::report {

inline constexpr char kPageStyle[] = R"css(
:root { color-scheme: light dark; }
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
