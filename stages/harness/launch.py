"""Start one stage: `python -m stages.harness.launch NAME`, the command of every stage in dvc.yaml.

It fixes what must be in the environment before the stage's process loads anything numeric (threads, instruction set, no
network look-ups), opens the run's journal, and takes the stage down with itself.
"""

import ctypes
import os
import signal
import subprocess
import sys
from typing import Any

from stages.core.determinism import environment
from stages.core.errors import ConfigError, DarkroomError, MachineError
from stages.harness import provenance, tracking
from stages.harness.config import flatten, load_shared, read_params
from stages.harness.journal import PipelineKey, begin, end
from stages.harness.run import fail, project_root

STAGES = ("ingest", "base", "preprocess", "encode", "train", "evaluate", "export")
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the stage named on the command line; ends with the stage's own exit code."""
    name = sys.argv[1] if len(sys.argv) == 2 else ""
    try:
        if name not in STAGES:
            raise ConfigError(f"no stage is called {name!r}", remedy="the stages are " + ", ".join(STAGES))
        params = read_params()
        shared = load_shared(params)
        if shared.runtime == "container":
            raise MachineError(
                "params.yaml says runtime: container, but no image digest is locked for this stage",
                remedy="set runtime: native; a stage never falls back to native by itself",
            )
        variables = environment(shared.determinism)
    except DarkroomError as error:
        fail(name or "launch", error)
        return
    raise SystemExit(_run(name, params, variables))


def _run(name: str, params: dict[str, Any], variables: dict[str, str]) -> int:
    root = project_root()
    facts = provenance.collect(root)
    provenance.write(root, name, facts)
    flat = {key: value for key, value in flatten(params).items() if key.split(".")[0] in (name, *_SHARED)}
    pipeline = PipelineKey.current()
    journal = begin(root, name, params=flat, tags=provenance.tags(facts), pipeline=pipeline)
    tracking.ensure_agent(root)
    # Models come from this machine alone; stage base, which may fetch one, asks for the network itself.
    offline = {} if name == "base" else {"HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", f"stages.{name}"],
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
        preexec_fn=_die_with_parent,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: process.send_signal(received))
    code = process.wait()
    end(journal, "FINISHED" if code == 0 else "KILLED" if code < 0 or code == 130 else "FAILED")
    return code if code >= 0 else 128 - code


_SHARED = ("seed", "device", "runtime", "determinism")


def _die_with_parent() -> None:
    """A killed launcher must not leave the stage behind: dvc would start a second copy beside it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
