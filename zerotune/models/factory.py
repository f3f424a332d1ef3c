"""The user's own code: ``module:function`` or ``path/to/file.py:function``.

Whatever goes wrong inside it is the user's to mend, so it is reported as one line that names the last line of
their own code; the whole traceback goes to the log and stays attached as the cause.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from zerotune.config.errors import RunFailed, UsageError, ZerotuneError
from zerotune.config.schema import FactoryConfig

log = logging.getLogger(__name__)


def call_factory(config: FactoryConfig) -> Any:
    """Load the function named by ``config.factory`` and call it with ``config.args`` as keywords.

    Raises:
        UsageError: The function is not there, or the user's code raised.
    """
    with users_code(f"factory {config.factory}"):
        return load_function(config.factory)(**config.args)


def load_function(factory: str) -> Callable[..., Any]:
    """Import the function that ``module:function`` or ``path/to/file.py:function`` names.

    Modules are also looked for in the current folder. A file is read afresh each time, so that an edit between
    two runs in one process takes effect.

    Raises:
        UsageError: No such file, module or function.
    """
    place, _, name = factory.rpartition(":")
    module = _load_file(place) if _is_file(place) else _import_module(place)
    try:
        function = getattr(module, name)
    except AttributeError:
        raise UsageError(
            f"factory {factory}: {place} has no function {name}", "check the name after the colon"
        ) from None
    if not callable(function):
        raise UsageError(f"factory {factory}: {name} is {type(function).__name__}, not a function")
    return function


def source_hash(factory: str) -> str:
    """SHA-256, hexadecimal, of the source file of a factory: part of what is trained.

    Raises:
        UsageError: No such file or module.
    """
    place = factory.rpartition(":")[0]
    if _is_file(place):
        path = _existing_file(place)
    else:
        with _current_folder_importable(), users_code(f"factory {factory}"):
            try:
                spec = importlib.util.find_spec(place)
            except ModuleNotFoundError:
                spec = None
        if spec is None or spec.origin is None:
            raise _no_module(place)
        path = Path(spec.origin)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Turn an exception of the user's code into a :class:`UsageError` of one line; ours pass as they are.

    MemoryError and torch's out-of-memory errors pass too: they are not mistakes but results.

    Args:
        what: Begins the line, e.g. ``factory my_model.py:build``.
    """
    try:
        yield
    except ZerotuneError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(describe_users_error(what, error), _SEE_LOG) from error


@contextmanager
def users_forward(what: str) -> Iterator[None]:
    """Turn an exception that the user's forward pass raised into a :class:`RunFailed` of one line.

    What an engine raises from hooks inside that pass, and running out of memory, pass as they are.
    """
    try:
        yield
    except ZerotuneError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        users = max((i for i, frame in enumerate(frames) if _is_users(frame)), default=None)
        if is_out_of_memory(error) or users is None or any(_is_ours(frame) for frame in frames[users:]):
            raise
        raise RunFailed(describe_users_error(what, error), _SEE_LOG) from error


def describe_users_error(what: str, error: Exception) -> str:
    """One line with the error and the last line of the user's own code; logs the whole traceback."""
    log.info("%s raised:\n%s", what, "".join(traceback.format_exception(error)))
    text = " ".join(str(error).split()) or "no message"
    return f"{what} raised {type(error).__name__}: {text}{_last_line(error)}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python could not allocate: CUDA's error class, or the CPU allocator's message."""
    import torch  # here, so that a source can be hashed without it

    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


_SEE_LOG = "the log has the whole traceback"
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PASSED_THROUGH = str(Path("models") / "access.py")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


def _is_ours(frame: traceback.FrameSummary) -> bool:
    # Operations pass through the watch on parameters; an error that comes out of it is that of the operation.
    return frame.filename.startswith(_OURS) and not frame.filename.endswith(_PASSED_THROUGH)


def _is_users(frame: traceback.FrameSummary) -> bool:
    is_library = (
        frame.filename.startswith((_STANDARD_LIBRARY, "<frozen", _OURS)) or "site-packages" in frame.filename
    )
    return not is_library


def _last_line(error: BaseException) -> str:
    """`` (file:line)`` of the innermost frame of the user's code; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({_short(error.filename)}:{error.lineno})"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame)]
    return f" ({_short(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def _short(filename: str) -> str:
    """The path relative to the current folder if it lies below, else as it is."""
    try:
        return str(Path(filename).resolve().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return filename


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place or os.sep in place


def _existing_file(place: str) -> Path:
    path = Path(place).expanduser()
    if not path.is_file():
        raise UsageError(f"factory file {place} does not exist", f"looked in {path.resolve().parent}")
    return path


def _load_file(place: str) -> ModuleType:
    path = _existing_file(place).resolve()
    name = f"zerotune_factory_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    # Registered, so that dataclasses and pickling inside the file find their module.
    sys.modules[name] = module
    with _current_folder_importable(path.parent), users_code(f"factory file {place}"):
        # Compiled here, not imported: byte code cached within the same second would hide an edit.
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    return module


def _import_module(place: str) -> ModuleType:
    with _current_folder_importable(), users_code(f"factory module {place}"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and (place == error.name or place.startswith(error.name + ".")):
                raise _no_module(place) from None
            raise


def _no_module(place: str) -> UsageError:
    return UsageError(
        f"factory module {place} cannot be found",
        "give module:function on the Python path, or path/to/file.py:function",
    )


@contextmanager
def _current_folder_importable(folder: Path | None = None) -> Iterator[None]:
    """Let imports look in ``folder`` (by default the current one) first, as ``python file.py`` would."""
    entry = str(folder or Path.cwd())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)
