"""What runs around every stage: its parameters, its store, its journal; errors in plain words."""

import dataclasses
import errno
import gc
import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from stages.core.determinism import DeterminismConfig
from stages.core.errors import DarkroomError, MachineError, StoreError
from stages.core.ranks import LostRanksError, ignore_signals, rank_and_count
from stages.core.store import Store, fingerprint
from stages.harness.closure import closure_digest
from stages.harness.config import SharedConfig, load_section, load_shared, read_params
from stages.harness.journal import Journal, NullJournal, open_journal
from stages.harness.processes import (
    LOST,
    STOPPED,
    first_to_fail,
    join_group,
    one_of_several,
    stop_on_signals,
)
from stages.harness.progress import progress
from stages.harness.provenance import cpu_kind

T = TypeVar("T")
C = TypeVar("C")

# Versions that can change what is computed; part of every fingerprint.
_LIBRARIES = (
    "torch",
    "diffusers",
    "transformers",
    "tokenizers",
    "peft",
    "accelerate",
    "safetensors",
    "pillow",
    "numpy",
    "pyarrow",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """What a stage is given besides its own section: where it works, what it shares, whom it tells."""

    name: str
    root: Path  # the workspace: dvc's cwd, a temporary copy under `dvc exp run --temp`
    shared: SharedConfig
    store: Store
    tracker: Journal | NullJournal
    quiet: bool = False  # one of several ranks and not the first: rank 0 talks for all

    @property
    def out(self) -> Path:
        """data/<stage>, the stage's one folder of outs."""
        return self.root / "data" / self.name

    def folder(self, stage: str) -> Path:
        """data/<stage> of an earlier stage."""
        return self.root / "data" / stage

    def inputs(self, *, code: str | None = None, **parts: Any) -> dict[str, Any]:
        """`parts` and all that any work of this stage depends on: code, versions, machine settings.

        code: the module whose imports count, where the work is less than the whole stage's.
        """
        return {
            **{name: _plain(part) for name, part in parts.items()},
            "code": closure_digest(code or f"stages.{self.name}"),
            "versions": {name: importlib.metadata.version(name) for name in _LIBRARIES},
            "device": self.shared.device,
            "determinism": _plain(self.shared.determinism),
            "hardware": _hardware(self.shared),
        }

    def fingerprint(self, *, code: str | None = None, **parts: Any) -> str:
        """One digest over `inputs`, 64 hex digits."""
        return fingerprint(self.inputs(code=code, **parts))

    def say(self, message: str) -> None:
        """One line for the person who watches."""
        if not self.quiet:
            print(f"{self.name}: {message}", flush=True)

    def progress(self, items: Iterable[T], *, total: int, what: str, unit: str, done: int = 0) -> Iterator[T]:
        """`items` under a progress bar."""
        if self.quiet:
            return iter(items)
        return progress(items, total=total, what=f"{self.name}: {what}", unit=unit, done=done)


def _hardware(shared: SharedConfig) -> str:
    """The kind of machine, where bytes depend on it: a store may be shared between machines."""
    if shared.device == "cuda":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return cpu_kind() if shared.determinism.mode == "native" else ""


def project_root() -> Path:
    """Where shared state lives: DVC_ROOT (also from experiments in temporary folders), else the git top, else the cwd."""
    if os.environ.get("DVC_ROOT"):
        return Path(os.environ["DVC_ROOT"])
    found = subprocess.run(
        ["git", "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=False
    )
    return Path(found.stdout.strip()) if found.returncode == 0 else Path.cwd()


def store_root() -> Path:
    """$DARKROOM_STORE, else .darkroom/store in the project."""
    override = os.environ.get("DARKROOM_STORE")
    return Path(override) if override else project_root() / ".darkroom" / "store"


def usable_store() -> Path:
    """`store_root`, made if missing. Raises StoreError that names the folder when it cannot be made."""
    root = store_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"the store {root} cannot be made: {error.strerror}",
            remedy="set DARKROOM_STORE to a folder that can be written, or unset it",
        ) from error
    return root


def stage_main(
    name: str,
    config: type[C],
    work: Callable[[C, Stage], None],
    *,
    fix: Callable[[DeterminismConfig], None] | None = None,
) -> None:
    """Run one stage as a process: read params.yaml, fix determinism, work, and end with 0 or one clear error and 1.

    fix: `core.determinism.apply`, given by the stages that compute with torch. The stage names it, not this module, so
    that the file is one of the stage's deps.
    """
    module = sys.modules["__main__"]
    if len(sys.argv) > 1:
        print((module.__doc__ or "").strip())
        print(f"\nParameters: section `{name}` of params.yaml; run it with `dvc repro {name}`.")
        raise SystemExit(0 if sys.argv[1] in ("-h", "--help") else 2)
    gc.freeze()  # of what is imported; else each full collection looks at it for 0.2 s (0.9 % of encoding 10,000 pictures)
    join_group()
    stop_on_signals()
    quiet = rank_and_count()[0] > 0
    tracker = NullJournal() if quiet else open_journal()
    start = time.monotonic()
    try:
        params = read_params()
        shared = load_shared(params)
        cfg = load_section(params, name, config)
        if fix:
            fix(shared.determinism)
            check_device(shared.device)
        store = Store(usable_store())
        stage = Stage(name=name, root=Path(), shared=shared, store=store, tracker=tracker, quiet=quiet)
        work(cfg, stage)
    except DarkroomError as error:
        fail(name, error)
    except OSError as error:
        fail(name, describe_os_error(error))
    except KeyboardInterrupt:
        if not one_of_several():  # what started them says it once
            print(f"{name}: {STOPPED}", file=sys.stderr)
        raise SystemExit(130) from None
    tracker.metrics({f"{name}/seconds": time.monotonic() - start})


def describe_os_error(error: OSError, *, chosen: bool = False) -> DarkroomError:
    """A full or read-only disk in plain words; raises any other error again.

    chosen: people give the paths, so any error that names one is theirs to mend too.
    """
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        return DarkroomError(
            f"{error}", remedy="free space or make the folder writable, then run the same command again"
        )
    if chosen and error.filename is not None:
        return DarkroomError(f"{error}", remedy="give a path that can be used")
    raise error


def fail(name: str, error: DarkroomError) -> NoReturn:
    """Print the error and its remedy, and end with 1. Of several ranks only the first to fail prints."""
    ignore_signals()
    if isinstance(error, LostRanksError) and one_of_several():
        raise SystemExit(LOST) from error
    if first_to_fail():
        print(f"{name}: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(1) from error


def check_device(device: str) -> None:
    """Raises MachineError when params ask for CUDA and torch finds no GPU, or fewer than this stage has processes."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        build = torch.version.cuda or "a CPU build"
        raise MachineError(
            f"params.yaml says device: cuda, but torch {torch.__version__} (CUDA: {build}) sees no GPU",
            remedy="set device: cpu, or install a CUDA build of torch and the driver; "
            "`python -m stages.cli doctor` shows what is there",
        )
    _, count = rank_and_count()
    if device == "cuda" and count > (gpus := torch.cuda.device_count()):
        raise MachineError(
            f"there are {count} processes, but torch sees {gpus} GPU(s): each process needs its own",
            remedy=f"set DARKROOM_PROCESSES={gpus}, or unset it for one process",
        )


def _plain(part: Any) -> Any:
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return dataclasses.asdict(part)
    return part
