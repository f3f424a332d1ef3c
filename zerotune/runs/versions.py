"""Versions that a measurement depends on."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("zerotune", "torch", "ray", "numpy")


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    found["python"] = platform.python_version()
    found["platform"] = platform.platform()
    return tuple(found.items())


def versions() -> dict[str, str]:
    """Versions of zerotune, torch, ray, numpy, Python and the platform."""
    return dict(_versions())
