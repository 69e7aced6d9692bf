"""Python functions that C++ calls in the midst of something collective."""

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any

from . import _C


class Callbacks:
    """Within a ``with``: all ranks get an ``Error`` with the text of what a callback raises on one. On that rank it has the
    original as its cause; Ctrl-C and ``SystemExit`` stay themselves there."""

    def __init__(self) -> None:
        self._raised: BaseException | None = None

    def __enter__(self) -> "Callbacks":
        return self

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            try:
                return function(*args)
            except BaseException as error:
                self._raised = error
                raise

        return call

    def __exit__(self, _kind: type | None, error: BaseException | None, _traceback: TracebackType | None) -> None:
        raised, self._raised = self._raised, None
        if raised is None or not isinstance(error, _C.Error):
            return
        if not isinstance(raised, Exception):
            raise raised from None
        error.__cause__ = raised
