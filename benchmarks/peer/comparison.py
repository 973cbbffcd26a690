"""What is concluded from the runs of both sides. A run is a dictionary: losses and seconds of every step, peak bytes of
every rank."""

import statistics

AIM = 1.5  # tokens/s of ours over those of the peer
# Greatest relative difference of two losses of the same step. bf16: one rounding.
LOSS_BOUND = {"fp32": 1e-3, "bf16": 2.0**-9}


def spread(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "samples": len(values)}


def side(runs, dropped, context):
    seconds = [s for run in runs for s in run["seconds"][dropped:]]
    peaks = max((run["peak_bytes"] for run in runs), key=sum)
    row = {
        "step_seconds": spread(seconds),
        "tokens_per_second": context / statistics.median(seconds),
        "peak_bytes_total": sum(peaks),
        "peak_bytes_largest_rank": max(peaks),
    }
    for name in ("planned_bytes", "start_bytes"):
        if name in runs[0]:
            row[name + "_total"] = sum(runs[0][name])
    return row


def compare(ours, peers, dropped, context, dtype):
    """The row of one configuration from its runs."""
    row = {"ours": side(ours, dropped, context), "peer": side(peers, dropped, context)}
    pairs = zip(ours, peers)
    ratios = [statistics.median(b["seconds"][dropped:]) / statistics.median(a["seconds"][dropped:]) for a, b in pairs]
    row["tokens_per_second_ratio"] = spread(ratios)
    ours_bytes, peer_bytes = row["ours"]["peak_bytes_total"], row["peer"]["peak_bytes_total"]
    row["peak_bytes_ratio"] = ours_bytes / peer_bytes
    # All of ours beside what the peer took after it had imported PyTorch.
    row["peak_bytes_ratio_without_start"] = ours_bytes / (peer_bytes - row["peer"]["start_bytes_total"])
    losses = zip(ours[0]["losses"], peers[0]["losses"], strict=True)
    differences = [abs(a - b) / abs(b) for a, b in losses]
    row["loss"] = {
        "ours": ours[0]["losses"],
        "peer": peers[0]["losses"],
        "greatest_relative_difference": max(differences),
        "bound": LOSS_BOUND[dtype],
        "agree": all(d <= LOSS_BOUND[dtype] for d in differences),  # a NaN never does
    }
    return row
