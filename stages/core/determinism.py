"""Threads, instruction set and deterministic kernels: what must be fixed for equal bytes.

CPU sums depend on the vector width and on the number of threads (measured: six training steps give other weights under
AVX-512, AVX2 and SSE; 1 and 2 threads differ). Both are read from the environment when torch and its libraries
load, so the launcher sets `environment()` before the stage's process starts, and `apply()` checks that they took.
"""

import os
from dataclasses import dataclass

from stages.core.errors import ConfigError, MachineError

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")

# AVX2 is the widest set that every x86-64 machine of the last ten years has.
_PORTABLE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
}


@dataclass(frozen=True, kw_only=True)
class DeterminismConfig:
    """Section `determinism` of params.yaml, shared by all stages that compute."""

    mode: str  # portable: capped to AVX2, the same bytes on most x86-64 machines; native: this machine's best
    threads: int  # CPU threads of every computation; a parameter, because sums depend on it


def environment(config: DeterminismConfig) -> dict[str, str]:
    """The variables that the launcher sets before anything numeric is imported."""
    if config.mode not in ("portable", "native"):
        raise ConfigError(
            f"determinism.mode is {config.mode!r}",
            remedy="set it to portable (same bytes on most x86-64 machines) or native (fastest on this one)",
        )
    if config.threads < 1:
        raise ConfigError(
            f"determinism.threads is {config.threads}", remedy="set it to 1 or more; it is part of the result"
        )
    variables: dict[str, str] = dict.fromkeys(_THREAD_VARIABLES, str(config.threads))
    variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    variables["PYTHONHASHSEED"] = "0"
    variables["TOKENIZERS_PARALLELISM"] = "false"
    if config.mode == "portable":
        variables |= _PORTABLE
    return variables


def apply(config: DeterminismConfig) -> None:
    """Fix threads and kernels in this process. Raises MachineError when the launcher's variables are missing."""
    import torch  # here, because the launcher imports this module and must stay light

    for name, expected in environment(config).items():
        if os.environ.get(name) != expected:
            raise MachineError(
                f"{name} is {os.environ.get(name)!r} instead of {expected!r}: this process was not started by the launcher",
                remedy="run the stage with `dvc repro` or `python -m stages.harness.launch STAGE`",
            )
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if config.mode == "portable" and torch.backends.cpu.get_cpu_capability() != "AVX2":
        raise MachineError(
            f"this CPU runs torch as {torch.backends.cpu.get_cpu_capability()}, but determinism.mode is portable (AVX2)",
            remedy="use a machine with AVX2, or set determinism.mode: native and accept other bytes",
        )
