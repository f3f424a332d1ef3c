"""The protocol that every engine implements, the group it runs on, and the ledger it keeps."""

from zerotune.engine.group import RankGroup
from zerotune.engine.ledger import LedgerKeeper
from zerotune.engine.protocol import Engine, StepResult

__all__ = ["Engine", "LedgerKeeper", "RankGroup", "StepResult"]
