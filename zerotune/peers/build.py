"""Peers by name."""

from __future__ import annotations

from torch import nn

from zerotune.engine.group import RankGroup
from zerotune.peers.base import Peer, PeerSetup


def build_peer(name: str, module: nn.Module, setup: PeerSetup, group: RankGroup) -> Peer:
    """Wrap a model.

    Args:
        name: One of :data:`zerotune.records.bench.PEERS`.
        module: The model, with its values, the same on every rank.
        setup: How it is trained.
        group: The ranks.

    Raises:
        UsageError: The library is not installed.
    """
    from zerotune.peers.ddp import Ddp
    from zerotune.peers.deepspeed import DeepSpeed, DeepSpeedScaled
    from zerotune.peers.fsdp2 import Fsdp2, Fsdp2Async, Fsdp2Keep

    classes: list[type[Peer]] = [Ddp, Fsdp2, Fsdp2Keep, Fsdp2Async, DeepSpeed, DeepSpeedScaled]
    return next(peer for peer in classes if peer.name == name)(module, setup, group)
