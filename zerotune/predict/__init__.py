"""Time and memory of schedules that have not run, from one that has: the choice behind ``release: planned``."""

from zerotune.predict.choose import Choice, Predictor, choose
from zerotune.predict.fit import fit_link
from zerotune.predict.replay import EventLoad, Replay, replay

__all__ = ["Choice", "EventLoad", "Predictor", "Replay", "choose", "fit_link", "replay"]
