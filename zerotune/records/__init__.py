"""The typed things that cross rooms."""

from zerotune.records.failure import Failure
from zerotune.records.fingerprint import Fingerprint
from zerotune.records.ledger import (
    ByteClass,
    ByteSample,
    CollectiveEntry,
    CollectiveKind,
    Ledger,
    MemoryHistory,
    MemoryPoint,
    OperationBytes,
    ReleaseEntry,
    UseEntry,
)
from zerotune.records.measurement import Confirmed, Interval, Measurement, MemoryUse
from zerotune.records.profile import Link, PassProfile, Profile
from zerotune.records.run import RunKind, RunRecord, StudyRecord
from zerotune.records.status import Status

__all__ = [
    "ByteClass",
    "ByteSample",
    "CollectiveEntry",
    "CollectiveKind",
    "Confirmed",
    "Failure",
    "Fingerprint",
    "Interval",
    "Ledger",
    "Link",
    "Measurement",
    "MemoryHistory",
    "MemoryPoint",
    "MemoryUse",
    "OperationBytes",
    "PassProfile",
    "Profile",
    "ReleaseEntry",
    "RunKind",
    "RunRecord",
    "Status",
    "StudyRecord",
    "UseEntry",
]
