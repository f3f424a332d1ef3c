"""Training data: sample i of step s is a function of the seed, s and i, never of the rank or the number of ranks."""

from zerotune.train.data.build import Data, build_data

__all__ = ["Data", "build_data"]
