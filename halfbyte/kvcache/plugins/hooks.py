"""Hooks on an engine's functions: whether they fit the engine at hand, and whether they hold.

And what both engines need besides: the tags of the pages that a prefix cache keeps.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from halfbyte import env
from halfbyte.errors import IntegrityError, UsageError
from halfbyte.kvcache.integrity.state import QUARANTINED
from halfbyte.kvcache.integrity.tracker import Mode

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hook:
    """A function of the engine, and what is called in its place."""

    target: str
    """Its dotted path."""
    parameters: str
    """Their names, as the engine's version has them that `around` was written for."""
    around: Callable[..., Any]
    """Takes the original before the arguments."""


def check_targets(hooks: Iterable[Hook], engine: str) -> None:
    """Raises IntegrityError for the first target that is missing or takes other parameters than it
    did; `engine` is its name and version."""
    hint = f"HALFBYTE_KV_INTEGRITY=off runs {engine} without KV-cache integrity"
    for hook in hooks:
        try:
            function = pkgutil.resolve_name(hook.target)
        except (ImportError, AttributeError) as error:
            raise IntegrityError(f"{engine} has no {hook.target}: {error}", hint=hint) from error
        found = " ".join(inspect.signature(function).parameters)
        if found != hook.parameters:
            raise IntegrityError(
                f"{engine}: {hook.target} takes ({found}), not ({hook.parameters})", hint=hint
            )


def put_in_place(hook: Hook) -> None:
    """Puts `around` into the target's place, in its module or class."""
    owner, _, name = hook.target.rpartition(".")
    original = pkgutil.resolve_name(hook.target)
    around = hook.around

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(pkgutil.resolve_name(owner), name, wrapper)


def is_installed(hook: Hook) -> bool:
    """Whether a call of the target comes to `around`, through however many wrappers."""
    function = pkgutil.resolve_name(hook.target)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook.around for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def check_installed(hooks: Iterable[Hook], engine: str) -> None:
    """Raises IntegrityError for hooks that are not in their place."""
    missing = [hook.target for hook in hooks if not is_installed(hook)]
    if missing:
        raise IntegrityError(
            f"{engine}: hooks are not in place: {', '.join(missing)}",
            hint="another plugin may replace these; SGLANG_PLUGINS and VLLM_PLUGINS choose plugins",
        )


def require_covered(unsupported: Sequence[str]) -> None:
    """Raises IntegrityError for what an engine does that hooks do not see, if it does any."""
    if unsupported:
        raise IntegrityError(
            f"KV-cache integrity does not cover {', '.join(unsupported)}",
            hint="leave these out, or set HALFBYTE_KV_INTEGRITY=off",
        )


class PrefixTags:
    """The tag under which a prefix cache was given each page that it keeps, by page. 0 is the tag
    of pages that it does not keep, which no page in use has.

    Kept by page and not by node, so it does not matter how the cache is built. A page that a second
    node is given gets a tag that fits neither: one of the two must be out of date.
    """

    def __init__(self, pages: int, device: torch.device | str) -> None:
        self._tags = torch.zeros(pages, dtype=torch.int32, device=device)

    def put(self, pages: torch.Tensor, tags: torch.Tensor) -> None:
        """The cache is given `pages` [n] with `tags` [n], as `Tracker.share` returned them."""
        pages = pages.long()
        self._tags[pages] = torch.where(self._tags[pages] == 0, tags, QUARANTINED)

    def of(self, pages: torch.Tensor) -> torch.Tensor:
        """The tags of `pages` [n] of a hit."""
        return self._tags[pages.long()]

    def drop(self, pages: torch.Tensor) -> None:
        """The cache gives up `pages` [n]."""
        self._tags.index_fill_(0, pages.long(), 0)

    def clear(self) -> None:
        """The cache gives up everything."""
        self._tags.zero_()


def read_mode() -> Mode:
    """`env.kv_integrity`. Ends the process if it means nothing: the engines would go on without."""
    try:
        return env.kv_integrity()
    except UsageError as error:
        raise SystemExit(f"KV-cache integrity: {error} ({error.hint})") from error


@contextlib.contextmanager
def stops_the_server(mode: Mode) -> Iterator[None]:
    """Around what sets up checks. If they cannot run, the process ends; in mode log it goes on
    without them, and that is logged. Engines only log what a plugin raises."""
    try:
        yield
    except IntegrityError as error:
        message = f"KV-cache integrity is not on: {error}" + (
            f" ({error.hint})" if error.hint else ""
        )
        if mode != "log":
            raise SystemExit(message) from error
        logger.error("%s", message)
