"""The ledger of device memory as a figure: a waterfall from nothing to what the driver reports."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from engine.memory.ledger import EMULATED, LEDGER_PARTS, RUN_PEAK, MemoryLedger
from engine.units import MIB

LARGE = ("weights", "kv_cache")  # beside these the others cannot be seen, so they have a panel of their own
OWN, UNEXPLAINED, OTHERS, TOTAL = "tab:blue", "tab:red", "tab:gray", "tab:green"


def memory_waterfall(ledger: MemoryLedger) -> Figure:
    """Each part on top of those before it at the last phase, up to the device's use and its limit; below, the parts
    without weights and KV cache, planned beside measured."""
    phase = ledger.last
    bars = {part.replace("_", " "): (phase.parts[part], OWN) for part in LEDGER_PARTS if phase.parts[part]}
    if phase.unexplained_bytes:
        bars["unexplained"] = (phase.unexplained_bytes, UNEXPLAINED)
    if phase.other_bytes:
        bars["other processes"] = (phase.other_bytes, OTHERS)
    small = [part for part in LEDGER_PARTS if part not in LARGE and (phase.parts[part] or ledger.planned.get(part))]
    heights = (len(bars) + 1, max(2, len(small)))
    figure = Figure(figsize=(10, 2.2 + 0.3 * sum(heights)), layout="constrained")
    whole, parts = figure.subplots(2, 1, height_ratios=heights)
    _draw_waterfall(whole, bars, ledger.limit_bytes)
    when = "at the peak of the run" if phase.phase == RUN_PEAK else "after start-up"
    figure.suptitle(f"device memory {when}" + (", emulated on a CPU" if ledger.source == EMULATED else ""))
    places = range(len(small))
    measured = parts.barh([place - 0.2 for place in places], [phase.parts[part] / MIB for part in small], 0.4,
                          label="measured", color=OWN)
    parts.bar_label(measured, fmt="{:,.1f}", padding=3)
    if ledger.planned:
        planned = parts.barh([place + 0.2 for place in places], [ledger.planned.get(part, 0) / MIB for part in small],
                             0.4, label="planned", color="lightgray")
        parts.bar_label(planned, fmt="{:,.1f}", padding=3, color="dimgray")
    parts.set_yticks(list(places), [part.replace("_", " ") for part in small])
    parts.set_xlabel("MiB, without weights and KV cache")
    parts.invert_yaxis()
    parts.margins(x=0.12)
    _legend_above(parts)
    return figure


def _draw_waterfall(axes: Axes, bars: dict[str, tuple[int, str]], limit_bytes: int | None) -> None:
    """One bar for each part from where the one before it ended, and one for their sum; the limit as a line."""
    start = 0
    for place, (num_bytes, color) in enumerate(bars.values()):
        axes.barh(place, num_bytes / MIB, left=start / MIB, color=color)
        axes.annotate(f"{num_bytes / MIB:,.1f}", (max(start, start + num_bytes) / MIB, place), (4, 0),
                      textcoords="offset points", va="center", fontsize="small")
        start += num_bytes
    axes.barh(len(bars), start / MIB, color=TOTAL)
    axes.annotate(f"{start / MIB:,.1f}", (start / MIB, len(bars)), (4, 0), textcoords="offset points", va="center",
                  fontsize="small")
    axes.set_yticks(range(len(bars) + 1), [*bars, "device in use"])
    if limit_bytes is not None:
        axes.axvline(limit_bytes / MIB, color="black", linestyle="--", label=f"limit {limit_bytes / MIB:,.1f}")
        _legend_above(axes)
    axes.set_xlabel("MiB")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.invert_yaxis()
    axes.margins(x=0.14)


def _legend_above(axes: Axes) -> None:
    """Where no bar reaches."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
