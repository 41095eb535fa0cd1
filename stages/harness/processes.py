"""Several processes for one stage: how many, how they start, and what is said when one of them fails.

`python -m stages.harness.processes STAGE COUNT`, started by the launcher, is torchrun with another ending. `accelerate
launch` would not do: with --cpu it starts one process unless MPI is there (1.15), with --multi_gpu it is torchrun behind
1.2 s of imports, and it reads a configuration from the home folder.
"""

import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stages.core.errors import ConfigError
from stages.core.ranks import ignore_signals

LOST = 75  # a rank's exit code after LostRanksError: the fault is another's, who says it or about whom it is said
STOPPED = "stopped; the same command continues from here"
# A rank in a long forward does not hear SIGTERM; then it is killed. Training finishes its step, and writes gigabytes.
_SECONDS_TO_STOP = {"train": 300}
_SECONDS_TO_STOP_ELSE = 10
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec as little as possible should happen


def processes(shards: object) -> int:
    """$DARKROOM_PROCESSES, 1 when unset. It is no parameter: it cannot change a byte.

    shards: preprocess.shards, as params.yaml has it. Raises ConfigError when the number is none, or over that of the shards:
    they are what is divided, and a process without one would only take memory.
    """
    text = os.environ.get("DARKROOM_PROCESSES", "1")
    if not (text.isascii() and text.isdecimal() and int(text)):
        raise ConfigError(
            f"the environment variable DARKROOM_PROCESSES is {text!r}",
            remedy="set it to a whole number, 1 or more, or unset it",
        )
    if isinstance(shards, int) and int(text) > max(shards, 1):
        raise ConfigError(
            f"the environment variable DARKROOM_PROCESSES is {text}, and preprocess.shards is {shards}: each process needs "
            "a shard",
            remedy=f"set it to {max(shards, 1)} or less, or raise preprocess.shards",
        )
    return int(text)


def die_with(parent: int) -> None:
    """Let the kernel kill this process with its `parent`: what is left behind would work beside the next one."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before the line above
        os._exit(137)


def stop_on_signals() -> None:
    """Let the first SIGTERM or SIGINT raise KeyboardInterrupt, and those that follow do nothing.

    Ctrl-C comes twice, from the terminal and through the launcher: the second must not break off the farewell.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)


@contextmanager
def stop_asked() -> Generator[Callable[[], bool]]:
    """Inside, SIGTERM and SIGINT break nothing off; what is yielded says whether one has come.

    For work that wants to finish a step and save it: it raises KeyboardInterrupt itself, when it has.
    """
    came: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield lambda: False
        return
    before = [signal.signal(number, lambda received, _frame: came.append(received)) for number in numbers]
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _stop(_signal: int, _frame: Any) -> None:
    ignore_signals()
    raise KeyboardInterrupt


def one_of_several() -> bool:
    """Whether `main` below started this process."""
    return "DARKROOM_RUNNER" in os.environ


def join_group() -> None:
    """In a stage's process that is one of several: die with what started them."""
    if one_of_several():
        die_with(int(os.environ["DARKROOM_RUNNER"]))


def first_to_fail() -> bool:
    """Whether this process should print its error: all ranks meet the same one, and nobody wants it twice."""
    mark = os.environ.get("DARKROOM_FAILED")
    if not mark:
        return True
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True  # the folder is gone or full: better twice than never
    return True


def verdict(codes: list[int]) -> tuple[int, str]:
    """The job's exit code and what is left to say, from the exit codes of its ranks other than 0, the first end first.

    torchrun stops the others as soon as one fails, by SIGTERM and 30 s later by SIGKILL: what they end with says little.
    """
    own = [code for code in codes if code > 0 and code not in (LOST, 130)]
    if own:  # it printed its error, or Python its traceback
        return own[0], ""
    signals = [-code for code in codes if code < 0 and code != -signal.SIGTERM]
    if signals:
        cause = "; if nobody did it, the machine ran out of memory" if signals[0] == signal.SIGKILL else ""
        said = f"one of the processes was ended by {signal.Signals(signals[0]).name}{cause}"
        return 128 + signals[0], f"{said}. The same command continues from here"
    if LOST in codes and 130 not in codes and -signal.SIGTERM not in codes:
        return 1, "the processes lost each other. The same command continues from here"
    return 130, STOPPED


def main() -> None:
    """Run the ranks; ends with 0, or with the code of the one that failed."""
    name, count = sys.argv[1:]
    stop_on_signals()
    try:
        with tempfile.TemporaryDirectory(prefix="darkroom-") as folder:
            code, message = _run(name, count, Path(folder))
    except KeyboardInterrupt:
        code, message = 130, STOPPED
    if message:
        print(f"{name}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(code)


def _run(name: str, count: str, folder: Path) -> tuple[int, str]:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable()  # it reports every exit code, and the failure once more as a table
    os.environ |= {
        "DARKROOM_RUNNER": str(os.getpid()),
        "DARKROOM_FAILED": str(folder / "failed"),
        # One machine: a host name that does not resolve would stop gloo and the rendezvous.
        "GLOO_SOCKET_IFNAME": "lo",
    }
    arguments = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", count]
    arguments += [
        "--log-dir",
        str(folder),
        "--shutdown-timeout",
        str(_SECONDS_TO_STOP.get(name, _SECONDS_TO_STOP_ELSE)),
    ]
    # Its own handlers would give up at a second Ctrl-C, and hear the SIGHUP that nohup has silenced.
    arguments += ["--signals-to-handle", ""]
    try:
        run(parse_args([*arguments, "-m", f"stages.{name}"]))
    except ChildFailedError as error:
        return verdict([failure.exitcode for failure in error.failures.values()])
    return 0, ""


if __name__ == "__main__":
    main()
