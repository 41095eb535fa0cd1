"""Start one stage: `python -m stages.harness.launch NAME`, the command of every stage in dvc.yaml.

It fixes what must be in the environment before the stage's process loads anything numeric (threads, instruction set, no
network look-ups), fetches a hub base that a fresh machine lacks, opens the run's journal, and takes the stage down with
itself.
"""

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from stages.core.determinism import environment
from stages.core.errors import ConfigError, DarkroomError, MachineError
from stages.core.record import read_record, recorded_folder
from stages.harness import provenance, tracking
from stages.harness.config import STAGES, did_you_mean, flatten, load_shared, read_params
from stages.harness.journal import PipelineKey, begin, dvc_ancestor, end
from stages.harness.processes import die_with, processes
from stages.harness.run import describe_os_error, fail, project_root

_SHARED = ("seed", "device", "runtime", "determinism")
_NEED_WEIGHTS = ("encode", "train", "evaluate", "export")


def main() -> None:
    """Run the stage named on the command line; ends with the stage's own exit code."""
    dvc = dvc_ancestor(os.getpid())
    try:
        name = _stage_name(sys.argv[1:])
    except ConfigError as error:
        fail("launch", error)
    try:
        params = read_params()
        shared = load_shared(params)
        if shared.runtime == "container":
            raise MachineError(
                "params.yaml says runtime: container, but no image digest is locked for this stage",
                remedy="set runtime: native; a stage never falls back to native by itself",
            )
        variables = environment(shared.determinism)
        count = _processes(name, flatten(params))
        if name in _NEED_WEIGHTS:
            fetch_base(Path())
        code = _run(name, params, variables, count, dvc)
    except DarkroomError as error:
        fail(name, error)
    except OSError as error:
        fail(name, describe_os_error(error))
    raise SystemExit(code)


def _stage_name(arguments: list[str]) -> str:
    if arguments in (["-h"], ["--help"]):
        print(f"{(__doc__ or '').strip()}\n\nThe stages are {', '.join(STAGES)}.")
        raise SystemExit(0)
    if len(arguments) != 1:
        raise ConfigError(
            f"one stage is expected, {len(arguments)} arguments are given",
            remedy="the stages are " + ", ".join(STAGES),
        )
    if arguments[0] not in STAGES:
        raise ConfigError(
            f"no stage is called {arguments[0]!r}{did_you_mean(arguments[0], STAGES)}",
            remedy="the stages are " + ", ".join(STAGES),
        )
    return arguments[0]


def fetch_base(root: Path) -> None:
    """Fetch a hub base that the record names and this machine lacks: `dvc pull` brings the record, not the weights."""
    path = root / "data" / "base" / "record.json"
    if path.is_file():  # where it is missing the stage itself says so
        record = read_record(path)
        if record.source["kind"] == "hub":
            recorded_folder(record, root, download=True)


def _processes(name: str, params: dict[str, Any]) -> int:
    """How many processes the stage runs in: encode in $DARKROOM_PROCESSES, train in as many as its parameter says."""
    if name == "encode":
        return processes(params.get("preprocess.shards"))
    count = params.get("train.processes") if name == "train" else 1
    return count if isinstance(count, int) and count > 1 else 1  # what is no number the stage itself refuses


def _run(name: str, params: dict[str, Any], variables: dict[str, str], count: int, dvc: int | None) -> int:
    root = project_root()
    facts = provenance.collect(root)
    provenance.write(root, name, facts)
    flat = {key: value for key, value in flatten(params).items() if key.split(".")[0] in (name, *_SHARED)}
    pipeline = PipelineKey.current()
    journal = begin(root, name, params=flat, tags=provenance.tags(facts), pipeline=pipeline)
    tracking.ensure_agent(root)
    # Models come from this machine alone; stage base, which may fetch one, asks for the network itself.
    offline = {} if name == "base" else {"HF_HUB_OFFLINE": "1"}
    command = [f"stages.{name}"] if count == 1 else ["stages.harness.processes", name, str(count)]
    launcher = os.getpid()
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        env={
            **os.environ,
            **variables,
            **offline,
            "DARKROOM_JOURNAL": str(journal or ""),
            "DARKROOM_PIPELINE_KEY": str(pipeline),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "DIFFUSERS_VERBOSITY": "error",
            "TRANSFORMERS_VERBOSITY": "error",
        },
        preexec_fn=lambda: die_with(launcher),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: process.send_signal(received))
    if dvc:
        threading.Thread(target=_end_with, args=[dvc], daemon=True).start()
    code = process.wait()
    if code == -signal.SIGKILL:
        print(
            f"{name}: killed; if nobody did, the machine ran out of memory. The same command continues from here",
            file=sys.stderr,
            flush=True,
        )
    end(journal, "FINISHED" if code == 0 else "KILLED" if code < 0 or code > 128 else "FAILED")
    return code if code >= 0 else 128 - code


def _end_with(dvc: int) -> None:
    """In a thread: stop the stage when dvc is over, also killed. Its shell may live on between the two: dash does.

    Started by hand the launcher outlives its shell, as under nohup.
    """
    try:
        select.select([os.pidfd_open(dvc)], [], [])
    except ProcessLookupError:
        pass  # over already
    except OSError:
        return  # a kernel before 5.3: the stage runs on to its end, and the lock keeps a second one out
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


if __name__ == "__main__":
    main()
