"""Sharded save and load, published atomically, and export of plain weights."""

from zerotune.checkpoints.export import export_weights, read_weights
from zerotune.checkpoints.flat_slice import FlatSlice
from zerotune.checkpoints.folders import complete_checkpoints, latest
from zerotune.checkpoints.manifest import RankWindow, Weight
from zerotune.checkpoints.sharded import (
    Checkpointable,
    abandon_save,
    begin_save,
    finish_save,
    load,
    save,
)
from zerotune.checkpoints.weight_files import WeightFiles, load_weights
from zerotune.checkpoints.writing import PendingSave

__all__ = [
    "Checkpointable",
    "FlatSlice",
    "PendingSave",
    "RankWindow",
    "Weight",
    "WeightFiles",
    "abandon_save",
    "begin_save",
    "complete_checkpoints",
    "export_weights",
    "finish_save",
    "latest",
    "load",
    "load_weights",
    "read_weights",
    "save",
]
