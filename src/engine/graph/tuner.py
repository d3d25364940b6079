"""The bucket list that wastes least for the batch sizes that a workload has, under a budget of graphs or of bytes.

A step costs what the smallest bucket that holds its requests costs: a measured replay time, or else the bucket's rows.
So the buckets cut the sorted batch sizes into runs, each served by its largest member, and the best list that ends at
one bucket extends the best list that ends at an earlier one: an exact dynamic program over (bucket, budget spent).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.graph.decode_profile import DecodeProfile, load_profile

DEFAULT_MAX_GRAPHS = 16
BYTE_UNITS = 1024  # a byte budget is spent in so many parts; each bucket is rounded up to whole ones
TIE = 1e-9  # costs that differ by a smaller share are equal: sums of floats


@dataclass(frozen=True)
class TunedList:
    """A tuned bucket list and what it promises for the steps that it was tuned for.

    Costs are milliseconds of replay where `is_measured`, else rows computed. `cost_with_one_fewer` is the least that a
    list of one graph fewer costs, None where there is only one; under a budget in bytes, a list of these sizes, so that
    it fits too. `num_steps_above` counts steps above the largest bucket, which no cost includes.
    """

    sizes: tuple[int, ...]
    cost: float
    cost_with_one_fewer: float | None
    is_measured: bool
    num_steps: int
    num_steps_above: int
    padding_waste: float

    @property
    def last_bucket_share(self) -> float | None:
        """What the last bucket is worth: the cost added by one graph fewer, as a share of the cost."""
        if self.cost_with_one_fewer is None or self.cost == 0:
            return None
        return (self.cost_with_one_fewer - self.cost) / self.cost


def tune(limit: int, histogram: Any, max_graphs: int | None = None, max_graph_bytes: int | None = None) -> TunedList:
    """The cheapest list that ends at `limit` and keeps to its budget; of equal ones, that which needs least of it.

    A budget in bytes is kept exactly; the list is the cheapest of those whose graphs, each rounded up to 1/1024 of the
    budget, keep to it. `histogram` is what `load_profile` takes. At most one budget may be given; without one it is
    DEFAULT_MAX_GRAPHS.
    Raises ValueError for a histogram that cannot be read and for a budget that cannot be kept.
    """
    # The file is read each time, so that a new one counts; what it says is the key under which the list is kept.
    return tune_profile(limit, load_profile(histogram), max_graphs, max_graph_bytes)


@functools.cache
def tune_profile(limit: int, profile: DecodeProfile, max_graphs: int | None = None,
                 max_graph_bytes: int | None = None) -> TunedList:
    """`tune` for a profile that has been loaded."""
    assert max_graphs is None or max_graph_bytes is None, f"two budgets: {max_graphs} graphs, {max_graph_bytes} bytes"
    # Observed batch sizes and the limit suffice: neither costs nor bytes fall with the size, so a bucket between two
    # observed sizes serves the same batches, and for no more, once it is lowered to the first of them.
    candidates = tuple(sorted({size for size in profile.steps_by_batch_size if size < limit} | {limit}))
    if max_graph_bytes is None:
        sizes = _best_of_at_most(max_graphs or DEFAULT_MAX_GRAPHS, candidates, profile)
    else:
        sizes = _best_within(max_graph_bytes, candidates, profile)
        candidates = sizes
    fewer = _best_of_at_most(len(sizes) - 1, candidates, profile) if len(sizes) > 1 else None
    served = _served(sizes, profile)
    num_steps = int(served.num_steps.sum())
    return TunedList(
        sizes=sizes,
        cost=serving_cost(sizes, profile),
        cost_with_one_fewer=serving_cost(fewer, profile) if fewer else None,
        is_measured=_is_measured(profile),
        num_steps=num_steps,
        num_steps_above=sum(profile.steps_by_batch_size.values()) - num_steps,
        padding_waste=served.padding_waste,
    )


def serving_cost(sizes: Sequence[int], profile: DecodeProfile) -> float:
    """What all steps of up to the largest of `sizes` cost in these buckets, in the unit of `TunedList.cost`."""
    served = _served(sizes, profile)
    return float(served.num_steps @ _replay_costs(served.buckets, profile))


def describe(tuned: TunedList) -> str:
    """One sentence: how many buckets for how many steps, what they waste, and what the last of them is worth."""
    parts = [f"tuned: {_count(len(tuned.sizes), 'bucket')} for {_count(tuned.num_steps, 'decode step')}",
             f"padding waste {tuned.padding_waste:.1%}"]
    if tuned.last_bucket_share is not None:
        unit = "replay time" if tuned.is_measured else "rows"
        parts.append(f"one bucket fewer would cost {tuned.last_bucket_share:.2%} more {unit}")
    if tuned.num_steps_above:
        parts.append(f"{_count(tuned.num_steps_above, 'step')} of more than {tuned.sizes[-1]} requests left out")
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class _Served:
    """The steps that a bucket list serves: for each batch size up to its largest, how many, and in which bucket."""

    num_steps: np.ndarray
    batch_sizes: np.ndarray
    buckets: np.ndarray

    @property
    def padding_waste(self) -> float:
        """Padded rows that hold no request, as a share of all padded rows; 0 without a step."""
        rows = self.num_steps @ self.buckets
        return float(self.num_steps @ (self.buckets - self.batch_sizes) / rows) if rows else 0.0


def _served(sizes: Sequence[int], profile: DecodeProfile) -> _Served:
    steps = sorted((size, num) for size, num in profile.steps_by_batch_size.items() if size <= max(sizes))
    batch_sizes, num_steps = np.array(steps, dtype=np.float64).reshape(-1, 2).T
    ascending = np.array(sorted(sizes), dtype=np.float64)
    return _Served(num_steps, batch_sizes, ascending[np.searchsorted(ascending, batch_sizes)])


def _best_of_at_most(max_graphs: int, candidates: tuple[int, ...], profile: DecodeProfile) -> tuple[int, ...]:
    return _best_list(candidates, profile, np.ones(len(candidates), dtype=np.int64), max_graphs)


def _best_within(max_bytes: int, candidates: tuple[int, ...], profile: DecodeProfile) -> tuple[int, ...]:
    if not profile.bytes_by_bucket:
        raise ValueError(f"graph.max_graph_bytes={max_bytes} needs the bytes of graphs, and graph.histogram has none: "
                         f"give the directory of a run that captured graphs on a GPU, or graph.max_graphs instead")
    num_bytes = graph_bytes(candidates, profile)
    if num_bytes[-1] > max_bytes:
        raise ValueError(f"graph.max_graph_bytes={max_bytes} is too small: the largest bucket, {candidates[-1]}, takes "
                         f"{num_bytes[-1]:.0f} bytes alone")
    if num_bytes.sum() <= max_bytes:  # everything fits: rounding up to units must not leave anything out
        return _best_of_at_most(len(candidates), candidates, profile)
    num_units = min(max_bytes, BYTE_UNITS)
    weights = np.maximum(np.ceil(num_bytes * num_units / max_bytes), 1).astype(np.int64)
    return _best_list(candidates, profile, weights, num_units)


def graph_bytes(sizes: Sequence[int], profile: DecodeProfile) -> np.ndarray:
    """Bytes that each graph of ascending `sizes` is expected to take, from those that the profile's run measured.

    The pool is shared: the largest graph brings it, in proportion to its rows, and the others what is theirs alone.
    """
    measured, ascending = profile.bytes_by_bucket, np.array(sizes, dtype=np.float64)
    if len(measured) == 1:
        return _rising_curve(measured, ascending)
    largest = max(measured)
    others = sorted(measured.keys() - {largest})
    own = _rising([measured[size] for size in others])
    pool_a_row = max(0.0, measured[largest] - own[-1]) / largest
    num_bytes = np.interp(ascending, others, own)
    num_bytes[-1] += pool_a_row * ascending[-1]
    return num_bytes


def _best_list(candidates: tuple[int, ...], profile: DecodeProfile,
               weights: np.ndarray, budget: int) -> tuple[int, ...]:
    """The cheapest list of `candidates` that ends with the last of them and weighs at most `budget`."""
    served = _served(candidates, profile)
    sizes = np.array(candidates, dtype=np.float64)
    num_steps = np.bincount(np.searchsorted(sizes, served.buckets), served.num_steps, minlength=len(sizes))
    return tuple(candidates[index] for index in cheapest(num_steps, _replay_costs(sizes, profile), weights, budget))


def cheapest(num_steps: np.ndarray, costs: np.ndarray, weights: np.ndarray, budget: int) -> list[int]:
    """Indices of the buckets that serve all steps for least, the last bucket always among them.

    Bucket `j` serves a step of index `j` or less for `costs[j]`, and spends `weights[j]` (at least 1) of the budget;
    `num_steps[j]` steps are of index `j`. Of lists that cost the same, the one that weighs least is taken.
    """
    assert weights[-1] <= budget, f"the last bucket weighs {weights[-1]}, the budget is {budget}"
    budget, num = min(budget, int(weights.sum())), len(costs)
    steps_before = np.concatenate([[0], np.cumsum(num_steps)])
    # best[spent, j]: least cost of the steps before index j with a bucket at j - 1 and for at most `spent`.
    best = np.full((budget + 1, num + 1), np.inf)
    best[:, 0] = 0
    previous = np.zeros((budget + 1, num + 1), dtype=np.int64)
    for j in range(1, num + 1):
        weight = weights[j - 1]
        if weight > budget:
            continue
        through = best[:budget + 1 - weight, :j] + (steps_before[j] - steps_before[:j]) * costs[j - 1]
        previous[weight:, j] = through.argmin(axis=1)
        best[weight:, j] = np.take_along_axis(through, previous[weight:, j, None], axis=1)[:, 0]
    spent = int(np.argmax(best[:, num] <= best[budget, num] * (1 + TIE)))
    indices, j = [], num
    while j > 0:
        indices.append(j - 1)
        spent, j = spent - weights[j - 1], previous[spent, j]
    return indices[::-1]


def _is_measured(profile: DecodeProfile) -> bool:
    """Whether replay times say what a bucket costs; one alone does not say how it grows."""
    return len(profile.replay_ms_by_bucket) >= 2


def _replay_costs(buckets: np.ndarray, profile: DecodeProfile) -> np.ndarray:
    """What one step costs in each bucket, in milliseconds or rows."""
    return _rising_curve(profile.replay_ms_by_bucket, buckets) if _is_measured(profile) else buckets


def _rising_curve(measured: dict[int, Any], sizes: np.ndarray) -> np.ndarray:
    """Values at `sizes` of the non-decreasing curve nearest to the measured points, straight between them.

    Beyond the ends it goes on with its mean slope, which noise between two neighbours hardly bends, and stays above 0.
    """
    known = np.array(sorted(measured), dtype=np.float64)
    values = _rising([measured[size] for size in sorted(measured)])
    share = values[0] / known[0]
    slope = (values[-1] - values[0]) / (known[-1] - known[0]) if len(known) > 1 else share
    end = known[-1] + max(sizes, default=1)
    return np.interp(sizes, [0, *known, end],
                     [values[0] - min(slope, share) * known[0], *values, values[-1] + slope * (end - known[-1])])


def _rising(values: Sequence[float]) -> np.ndarray:
    """The non-decreasing values nearest to these by least squares (pool adjacent violators); their sum is unchanged."""
    pools: list[tuple[float, int]] = []  # sum, number
    for value in values:
        total, number = value, 1
        while pools and pools[-1][0] * number >= total * pools[-1][1]:
            total, number = total + pools[-1][0], number + pools.pop()[1]
        pools.append((total, number))
    return np.repeat([total / number for total, number in pools], [number for _, number in pools])
