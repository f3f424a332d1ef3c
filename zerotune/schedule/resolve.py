"""``auto`` becomes a number once the model is known."""

from __future__ import annotations

from zerotune.config.knobs import AUTO, Knobs

PERSISTENCE_LIMIT = 100_000
"""Largest default of ``param_persistence_threshold``: DeepSpeed's own default, in elements."""


PREFETCH_BLOCKS = 4
"""Default of ``prefetch_distance``: with one block, the link idles while the loss and the head run backward; each further
one costs its buffer at the peak, which falls there (docs/decisions.md)."""

BACKWARD_PREFETCH_BLOCKS = 5
"""Default of ``backward_prefetch_distance`` beside the default of ``prefetch_distance``, written out or not: under the head's
backward the link would be idle. More of them cost their buffers where activations are most (docs/decisions.md). Who sets another
distance means a bound, and means it for both."""


def resolve_knobs(knobs: Knobs, block: int) -> Knobs:
    """Replace every ``auto`` by its number.

    Args:
        knobs: As the user or the search set them.
        block: Elements of the model's largest repeated block.

    Returns:
        Knobs without ``auto``; the record of a run holds these.
    """
    usual = PREFETCH_BLOCKS * block
    is_usual = knobs.prefetch_distance in (AUTO, usual)
    numbers = {
        "allgather_bucket_size": block,
        "prefetch_distance": usual,
        "backward_prefetch_distance": BACKWARD_PREFETCH_BLOCKS * block
        if is_usual
        else knobs.prefetch_distance,
        "param_persistence_threshold": min(PERSISTENCE_LIMIT, block // 100),
        "reduce_bucket_size": block,
    }
    return knobs.model_copy(update={name: n for name, n in numbers.items() if getattr(knobs, name) == AUTO})
