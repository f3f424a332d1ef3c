"""Sharded save and load, published atomically."""

from zerotune.checkpoints.flat_slice import FlatSlice
from zerotune.checkpoints.folders import complete_checkpoints, latest
from zerotune.checkpoints.sharded import Checkpointable, load, save

__all__ = ["Checkpointable", "FlatSlice", "complete_checkpoints", "latest", "load", "save"]
