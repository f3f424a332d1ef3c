"""Write the lock files from what is installed: exact versions of everything that zerotune needs, and no index address.

``requirements/run.lock`` is what running needs (with the extra ``hf``), ``requirements/dev.lock`` everything. Run it
in an environment into which ``pip install .[hf,peers,postgres,dev]`` has resolved the versions to keep.
"""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
HEADER = "# Written by scripts/lock.py (make lock). Exact versions; the index is the installer's own.\n"


def closure(requirements: list[str]) -> dict[str, str]:
    """Names and versions of requirements and of everything they require, as installed."""
    found: dict[str, str] = {}
    waiting = [(Requirement(text), frozenset[str]()) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement, parents_extras = waiting.pop()
        if requirement.marker and not any(
            requirement.marker.evaluate({"extra": extra}) for extra in (parents_extras or {""})
        ):
            continue
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"{name} is required but not installed") from None
        found[name] = installed.version.split("+")[0]
        waiting += [(Requirement(text), extras | {""}) for text in installed.requires or []]
    return found


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = project["project"]["dependencies"]
    extras = project["project"]["optional-dependencies"]
    build = project["build-system"]["requires"]
    locks = {
        "run.lock": needed + extras["hf"],
        "dev.lock": [*needed, *build, *(text for extra in extras.values() for text in extra)],
    }
    for filename, requirements in locks.items():
        lines = [f"{name}=={version}\n" for name, version in sorted(closure(requirements).items())]
        (ROOT / "requirements" / filename).write_text(HEADER + "".join(lines))
        print(f"requirements/{filename}: {len(lines)} packages")


if __name__ == "__main__":
    main()
