"""The tables. Their names begin with ``zt_``, so that they can live beside Optuna's own in one database.

A row holds the whole record as JSON text, and beside it the few columns that are queried. The text is not a JSON
column because a loss may be NaN, which PostgreSQL's JSON refuses.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, LargeBinary, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from zerotune.records import RunRecord, StudyRecord

SCHEMA_VERSION = 1


class Base(DeclarativeBase):
    """Base of the rows."""


class MetaRow(Base):
    """Facts of the database itself; ``schema_version`` is one."""

    __tablename__ = "zerotune_meta"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str]


class RunRow(Base):
    """One :class:`~zerotune.records.RunRecord`."""

    __tablename__ = "zt_runs"
    __table_args__ = (
        Index("zt_runs_question", "workload_key", "cluster_key"),
        Index("zt_runs_study", "study"),
    )

    run_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32))
    status: Mapped[str] = mapped_column(String(32))
    study: Mapped[str | None]
    trial_number: Mapped[int | None]
    workload_key: Mapped[str] = mapped_column(String(64))
    cluster_key: Mapped[str] = mapped_column(String(64))
    created: Mapped[datetime]
    tokens_per_second: Mapped[float | None]
    step_time_s: Mapped[float | None]
    peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    feasible: Mapped[bool | None]
    record: Mapped[str]

    @staticmethod
    def values(run: RunRecord) -> dict[str, Any]:
        """The columns of a record."""
        measured = run.measurement
        return {
            "run_id": run.run_id,
            "kind": run.kind.value,
            "status": run.status.value,
            "study": run.study,
            "trial_number": run.trial_number,
            "workload_key": run.workload.key,
            "cluster_key": run.cluster.key,
            "created": _naive_utc(run.created),
            "tokens_per_second": measured.tokens_per_second.value if measured else None,
            "step_time_s": measured.step_time_s.value if measured else None,
            "peak_memory_bytes": measured.peak_memory_bytes if measured else None,
            "feasible": run.feasible,
            "record": to_text(run),
        }


class StudyRow(Base):
    """One :class:`~zerotune.records.StudyRecord`."""

    __tablename__ = "zt_studies"

    name: Mapped[str] = mapped_column(primary_key=True)
    workload_key: Mapped[str] = mapped_column(String(64), index=True)
    cluster_key: Mapped[str] = mapped_column(String(64))
    created: Mapped[datetime]
    record: Mapped[str]

    @staticmethod
    def values(study: StudyRecord) -> dict[str, Any]:
        """The columns of a record."""
        return {
            "name": study.name,
            "workload_key": study.workload.key,
            "cluster_key": study.cluster.key,
            "created": _naive_utc(study.created),
            "record": to_text(study),
        }


class LedgerRow(Base):
    """The ledgers of one steady step of a run, all ranks: JSON compressed with zlib."""

    __tablename__ = "zt_ledgers"

    run_id: Mapped[str] = mapped_column(ForeignKey("zt_runs.run_id", ondelete="CASCADE"), primary_key=True)
    data: Mapped[bytes] = mapped_column(LargeBinary)


def to_text(record: RunRecord | StudyRecord) -> str:
    """A record as JSON text that :meth:`pydantic.BaseModel.model_validate` reads back, NaN included."""
    return json.dumps(record.model_dump(mode="json"), separators=(",", ":"))


def _naive_utc(moment: datetime) -> datetime:
    # SQLite keeps no time zones; the record itself has the exact moment.
    return moment.astimezone(UTC).replace(tzinfo=None)
