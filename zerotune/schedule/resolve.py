"""``auto`` becomes a number once the model is known."""

from __future__ import annotations

from zerotune.config.knobs import AUTO, Knobs

PERSISTENCE_LIMIT = 100_000
"""Largest default of ``param_persistence_threshold``: DeepSpeed's own default, in elements."""


PREFETCH_BLOCKS = 4
"""Default of ``prefetch_distance``: with one block, the link idles while the loss and the head run backward; each further
one costs its buffer at the peak, which falls there (docs/decisions.md)."""


def resolve_knobs(knobs: Knobs, block: int) -> Knobs:
    """Replace every ``auto`` by its number.

    Args:
        knobs: As the user or the search set them.
        block: Elements of the model's largest repeated block.

    Returns:
        Knobs without ``auto``; the record of a run holds these.
    """
    ahead = PREFETCH_BLOCKS * block if knobs.prefetch_distance == AUTO else knobs.prefetch_distance
    numbers = {
        "allgather_bucket_size": block,
        "prefetch_distance": ahead,
        "backward_prefetch_distance": ahead,
        "param_persistence_threshold": min(PERSISTENCE_LIMIT, block // 100),
        "reduce_bucket_size": block,
    }
    return knobs.model_copy(update={name: n for name, n in numbers.items() if getattr(knobs, name) == AUTO})
