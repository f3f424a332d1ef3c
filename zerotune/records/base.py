"""Base of everything that crosses rooms."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Record(BaseModel):
    """An immutable, strict record."""

    model_config = ConfigDict(extra="forbid", frozen=True)
