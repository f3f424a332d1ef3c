"""What makes two runs comparable."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from zerotune.records.base import Record


class Fingerprint(Record):
    """A short key and the facts it stands for; equal facts give equal keys on every machine.

    Attributes:
        key: First 16 hexadecimal digits of the SHA-256 of the canonical JSON of ``facts``.
        facts: What was hashed, readable.
    """

    key: str
    facts: dict[str, Any]

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Fingerprint:
        canonical = json.dumps(facts, sort_keys=True, separators=(",", ":"), default=str)
        return cls(key=hashlib.sha256(canonical.encode()).hexdigest()[:16], facts=json.loads(canonical))

    def difference(self, other: Fingerprint) -> dict[str, tuple[Any, Any]]:
        """Facts that differ, as ``{name: (mine, theirs)}``."""
        names = sorted(set(self.facts) | set(other.facts))
        pairs = {name: (self.facts.get(name), other.facts.get(name)) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
