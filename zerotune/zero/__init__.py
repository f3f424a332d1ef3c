"""The ZeRO engine itself."""

from zerotune.zero.engine import ZeroEngine

__all__ = ["ZeroEngine"]
