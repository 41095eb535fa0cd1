"""Progress bars for people, a line now and then for logs."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(items: Iterable[T], *, total: int, what: str, unit: str, done: int = 0) -> Iterator[T]:
    """Yield `items` under a bar with rate and time left; in a log, one line at most every half minute.

    done: how many of `total` were finished earlier (a resumed run).
    """
    terminal = sys.stderr.isatty()
    yield from tqdm(
        items,
        total=total,
        initial=done,
        desc=what,
        unit=f" {unit}",
        leave=False,
        mininterval=0.2 if terminal else 30.0,
        ascii=not terminal,
        ncols=None if terminal else 90,
        # A short loop in a log prints nothing at all.
        delay=0.5 if terminal else 30.0,
    )
