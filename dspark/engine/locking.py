"""One thread at a time inside an engine: its state changes in steps that must not interleave."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class HasLock(Protocol):
    """What has a re-entrant lock of its own."""

    @property
    def lock(self) -> AbstractContextManager[bool]: ...


S = TypeVar("S", bound=HasLock)


def locked(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Hold the object's lock while ``method`` runs."""

    @functools.wraps(method)
    def held(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.lock:
            return method(self, *args, **kwargs)

    return cast(Callable[Concatenate[S, P], T], held)
