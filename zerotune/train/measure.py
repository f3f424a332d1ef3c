"""What may be said of measured times: medians, intervals, when to stop. Pure Python.

Step times are not normal: most lie close together, and a few are much longer because something else ran. So the
figure is the median, and its interval comes from order statistics, which need no distribution at all: the k-th
smallest of n values is below the median with a binomial probability. The exact intervals jump with k (97.9 % or
89.1 % for ten values), so the two around 95 % are interpolated, after Hettmansperger and Sheather, "Confidence
intervals based on interpolated order statistics" (Statistics & Probability Letters 4, 1986). Its coverage stays
within about one percent of 95 % for any smooth distribution from six values on; below six values no order statistic
reaches 95 % and the interval is the whole range. Steps that follow one another are taken to be independent; a
machine whose mood changes over seconds breaks that, which is why a winner is confirmed in turns.

Ratios of runs in turns are few, and each is already a quotient of medians. Their logarithms are taken to be normal,
and the interval is Student's: honest down to two rounds, and turned over when numerator and denominator are.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from zerotune.records import Interval

CONFIDENCE = 0.95

StopReason = Literal["interval", "cannot_win", "budget"]


def median_interval(values: Sequence[float]) -> Interval:
    """Median of a sample with its 95 % interval.

    Args:
        values: At least one; in any unit, which is also that of the result.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("there is no median of no values")
    ordered = sorted(values)
    n, middle = len(ordered), statistics.median(ordered)
    rank = _rank(n)
    if rank == 0:
        return Interval(value=middle, low=ordered[0], high=ordered[-1])
    # The interval from the rank-th smallest to the rank-th largest covers more than 95 %, the next one inside less.
    outer, inner = _coverage(n, rank), _coverage(n, rank + 1)
    share = (outer - CONFIDENCE) / (outer - inner)
    weight = (n - rank) * share / (rank + (n - 2 * rank) * share)
    low = (1 - weight) * ordered[rank - 1] + weight * ordered[rank]
    high = (1 - weight) * ordered[n - rank] + weight * ordered[n - rank - 1]
    # Rounding must put neither the median outside of its own interval nor the interval outside of the sample.
    return Interval(
        value=middle,
        low=max(ordered[0], min(low, middle)),
        high=min(ordered[-1], max(high, middle)),
    )


def _coverage(n: int, rank: int) -> float:
    """Probability that the median lies between the rank-th smallest and the rank-th largest of n values."""
    return 1 - 2 * sum(math.comb(n, k) for k in range(rank)) / 2**n


def _rank(n: int) -> int:
    """The largest rank whose interval covers at least 95 %; 0 if none does."""
    rank = 0
    while rank + 1 <= n // 2 and _coverage(n, rank + 1) >= CONFIDENCE:
        rank += 1
    return rank


def throughput(step_time: Interval, tokens_per_step: float) -> Interval:
    """Tokens per second from seconds per step; a long step is a low throughput, so the ends change places."""
    return Interval(
        value=tokens_per_step / step_time.value,
        low=tokens_per_step / step_time.high,
        high=tokens_per_step / step_time.low,
    )


def slowest(step_times: Sequence[Sequence[float]]) -> list[float]:
    """Time of each step on its slowest rank, from each rank's times."""
    return [max(times) for times in zip(*step_times, strict=True)]


def stop_reason(
    step_times: Sequence[float],
    tokens_per_step: float,
    *,
    min_steps: int,
    max_steps: int,
    half_width: float,
    give_up_below: float | None,
) -> StopReason | None:
    """Whether measuring may end, and why.

    Looking at the interval after every few steps and stopping once it is narrow makes its true coverage a little less
    than 95 %.

    Args:
        step_times: Steady steps so far, seconds.
        tokens_per_step: Real tokens per optimizer step.
        min_steps: Never end before as many steps.
        max_steps: The budget of steps.
        half_width: Narrow enough, as a share of the median.
        give_up_below: Tokens per second; a run whose interval lies below it cannot win.

    Returns:
        ``interval``: it is narrow enough; ``cannot_win``; ``budget``: it is spent, and the figure is noisy;
        ``None``: go on.
    """
    if len(step_times) < min_steps:
        return None
    interval = median_interval(step_times)
    if interval.relative_half_width < half_width:
        return "interval"
    if give_up_below is not None and throughput(interval, tokens_per_step).high < give_up_below:
        return "cannot_win"
    return "budget" if len(step_times) >= max_steps else None


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Ratio a / b of two things that were measured side by side in each of several rounds.

    Args:
        a: One figure per round.
        b: The other's figure of the same round.

    Returns:
        The geometric mean of the rounds' ratios with its 95 % interval.

    Raises:
        ValueError: Fewer than two rounds, unequal numbers of them, or a figure that is not above 0.
    """
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"a paired ratio needs two or more rounds of both, found {len(a)} and {len(b)}")
    if min(*a, *b) <= 0:
        raise ValueError("a paired ratio needs figures above 0")
    logs = [math.log(x / y) for x, y in zip(a, b, strict=True)]
    mean = statistics.fmean(logs)
    half = student_quantile(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(value=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half))


_STUDENT = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
)


def student_quantile(freedom: int) -> float:
    """The 97.5 % point of Student's t: a table up to 20 degrees of freedom, then Cornish and Fisher's expansion."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
