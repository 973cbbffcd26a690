// How the parts of a chart look, beside the colours that every picture shares (palette.h).
#pragma once

namespace upipe::chart {

inline constexpr char kChartStyle[] = R"css(
svg { width: 100%; height: auto; display: block; overflow: visible; }
svg text { font: 11.5px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: var(--soft);
  font-variant-numeric: tabular-nums; }
svg text.side, svg text.strong { fill: var(--ink); }
svg text.small { font-size: 11px; }
svg text.rim { paint-order: stroke; stroke: var(--card); stroke-width: 3px;
  stroke-linejoin: round; }
svg .grid { stroke: var(--faint); } svg .axis { stroke: var(--rule); } svg .section {
  stroke: var(--rule); stroke-dasharray: 2 3; }
svg .line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
svg .level { stroke-width: 1.5; stroke-dasharray: 5 4; }
svg .marker { stroke: var(--card); stroke-width: 2; }
svg .band { stroke: var(--card); stroke-width: 0.5; } svg .band.dense { stroke: none; }
svg .hover { fill: transparent; } svg .hover:hover { fill: var(--ink); fill-opacity: 0.07; }
)css";

}  // namespace upipe::chart
