"""Progress: a bar for people, a line now and then for logs."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")
LOG_SECONDS = 30.0


def progress(items: Iterable[T], *, total: int, what: str, unit: str, done: int = 0) -> Iterator[T]:
    """Yield `items` under a bar with rate and time left; in a log, one line at most every half minute.

    done: how many of `total` were finished earlier (a resumed run).
    """
    if not sys.stderr.isatty():
        yield from _lines(items, total=total, what=what, unit=unit, done=done)
        return
    yield from tqdm(
        items, total=total, initial=done, desc=what, unit=f" {unit}", leave=False, mininterval=0.2, delay=0.5
    )


def _lines(items: Iterable[T], *, total: int, what: str, unit: str, done: int) -> Iterator[T]:
    """A bar would write carriage returns into the log, and all of it on one line."""
    start = last = time.monotonic()
    for number, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - last >= LOG_SECONDS:
            last = now
            rate = number / (now - start)
            left = max(total - done - number, 0) / rate
            print(
                f"{what}: {done + number} of {total} {unit}, {rate:.3g} a second, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )
