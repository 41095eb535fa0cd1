"""What the launcher must set, and that a stage notices when it did not."""

import os
import subprocess
import sys

import pytest

from stages.core.determinism import DeterminismConfig, apply, environment
from stages.core.errors import ConfigError, MachineError

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def test_portable_caps_threads_and_instructions() -> None:
    assert environment(DeterminismConfig(mode="portable", threads=3)) == {
        **dict.fromkeys(THREADS, "3"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_CBWR": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
    }


def test_native_caps_threads_alone() -> None:
    variables = environment(DeterminismConfig(mode="native", threads=1))
    assert set(variables) == {*THREADS, "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED", "TOKENIZERS_PARALLELISM"}


@pytest.mark.parametrize(
    ("mode", "threads", "message"),
    [
        ("fast", 1, "determinism.mode is 'fast'\n  remedy: set it to portable"),
        ("native", 0, "determinism.threads is 0"),
    ],
)
def test_refused(mode: str, threads: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environment(DeterminismConfig(mode=mode, threads=threads))


def test_apply_without_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    message = (
        r"OMP_NUM_THREADS is '7' instead of '1': this process was not started by the launcher\n"
        r"  remedy: run the stage with `dvc repro` or `python -m stages.harness.launch STAGE`"
    )
    with pytest.raises(MachineError, match=message):
        apply(DeterminismConfig(mode="native", threads=1))


CODE = """
import torch
from stages.core.determinism import DeterminismConfig, apply
apply(DeterminismConfig(mode="portable", threads=2))
print(torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.backends.cpu.get_cpu_capability())
"""


def test_apply_takes_effect() -> None:
    variables = environment(DeterminismConfig(mode="portable", threads=2))
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "2 True AVX2\n", done.stderr


def test_a_machine_without_avx2_is_named() -> None:
    """Played by asking torch for less, after the check of the variables."""
    code = CODE.replace("apply(Det", "torch.backends.cpu.get_cpu_capability = lambda: 'DEFAULT'\napply(Det")
    variables = environment(DeterminismConfig(mode="portable", threads=2))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        "MachineError: this CPU runs torch as DEFAULT, but determinism.mode is portable (AVX2)" in done.stderr
    )
