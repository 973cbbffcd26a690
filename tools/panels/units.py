"""Numbers as people read them, in the units of Grafana, and the ticks of an axis."""

import math
import time

TIME_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def scaled(value, steps, unit, places=3):
    for size, prefix in steps:
        if abs(value) >= size:
            return f"{digits(value / size, places)} {prefix}{unit}".rstrip()
    return f"{digits(value, places)} {unit}".rstrip()


def digits(value, places):
    """With so many that count, without zeros at the end."""
    if value == 0:
        return "0"
    if abs(value) >= 10 ** places or abs(value) < 1e-4:
        return f"{value:,.0f}" if abs(value) >= 1 else f"{value:.1e}"
    text = f"{value:.{max(0, places - 1 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def duration(value):
    size = abs(value)
    if size >= 86400:
        return f"{digits(value / 86400, 3)} d"
    if size >= 3600:
        return f"{digits(value / 3600, 3)} h"
    if size >= 120:
        return f"{digits(value / 60, 3)} min"
    if size >= 1 or size == 0:
        return f"{digits(value, 3)} s"
    return f"{digits(value * 1e3, 3)} ms" if size >= 1e-3 else f"{digits(value * 1e6, 3)} µs"


def shown(value, unit, decimals=None):
    if value is None or math.isnan(value):
        return "no value"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit == "bytes":
        return scaled(value, ((2**40, "Ti"), (2**30, "Gi"), (2**20, "Mi"), (2**10, "Ki")), "B", 4)
    if unit == "percentunit":
        return f"{value * 100:.{decimals}f} %" if decimals is not None else f"{digits(value * 100, 3)} %"
    if unit == "s":
        return duration(value)
    if unit == "Bps":
        return scaled(value, SI, "B/s")
    if unit in ("ops", "reqps", "wps"):
        return scaled(value, SI, {"ops": "/s", "reqps": "req/s", "wps": "writes/s"}[unit])
    if unit == "sci":
        return f"{value:.3g}"
    if unit == "short":
        return scaled(value, SI, "")
    return f"{value:.{decimals}f}" if decimals is not None else digits(value, 4) if value % 1 else f"{value:,.0f}"


def ticks(low, high, unit, count=4):
    """Round values from low to high."""
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    base = 1
    if unit == "bytes":
        base = 1024 ** max(0, math.floor(math.log(max(span / count, 1), 1024)))
    raw = span / count / base
    if unit == "bytes":
        step = base * 2 ** max(0, math.ceil(math.log2(raw))) if raw > 0 else base
    elif unit == "s" and raw > 20:
        step = next((size for size in TIME_STEPS if size >= raw), TIME_STEPS[-1])
    else:
        power = 10 ** math.floor(math.log10(raw))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
        if unit == "none" and high >= 4:
            step = max(1, step)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def clock(moments):
    """The text of each time tick."""
    seconds = any(moment % 60 for moment in moments)
    return [time.strftime("%H:%M:%S" if seconds else "%H:%M", time.gmtime(moment)) for moment in moments]


def time_ticks(start, end, count):
    wanted = (end - start) / max(count, 1)
    step = next((size for size in TIME_STEPS if size >= wanted), TIME_STEPS[-1])
    first = math.ceil(start / step)
    return [number * step for number in range(first, math.floor(end / step) + 1)]
