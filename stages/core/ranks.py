"""Ranks: the processes that share one stage's work on one machine, each with a part of it.

torchrun's variables (RANK, WORLD_SIZE, ...), which `accelerate launch` sets as well, say who is who; accelerate's
PartialState reads them and joins the processes.
"""

import atexit
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from stages.core.errors import DarkroomError

T = TypeVar("T")

# A rank may work for hours while the others wait for it; torch gives up after 30 minutes. A dead rank is noticed at
# once all the same: the kernel closes its connections.
_PATIENCE = timedelta(days=30)


class LostRanksError(DarkroomError):
    """Another rank has ended while this one waited for it. What is wrong is said by, or about, the other."""


@dataclass(frozen=True)
class Ranks:
    """This process among those that share the work."""

    number: int  # 0 <= number < count
    count: int  # 1 or more
    device: str = "cpu"  # torch's name of this rank's own: cpu, cuda (one process), cuda:1 (of several)

    @property
    def main(self) -> bool:
        """Whether this is rank 0: it alone writes outs, tracks and talks."""
        return self.number == 0

    def mine(self, values: list[T]) -> list[T]:
        """This rank's part of `values`: every count-th, beginning at number. Over all ranks each value comes once."""
        return values[self.number :: self.count]

    def gather(self, value: T) -> list[T]:
        """[the value of rank 0, of rank 1, ...], the same on every rank; each must call it, and waits for all.

        value: what pickle takes, tensors on the CPU. Pickles pass between our own processes alone, never from a file.
        Raises LostRanksError when another rank ends instead.
        """
        if self.count == 1:
            return [value]
        import torch.distributed  # here: the harness imports this module and must stay light

        values: list[Any] = [None] * self.count
        with self.together():
            torch.distributed.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self) -> Generator[None]:
        """Inside, torch.distributed may wait for the others. Raises LostRanksError when one of them ends instead."""
        try:
            yield
        except RuntimeError as error:  # "Connection closed by peer"
            if self.count == 1 or not any(
                word in str(error).lower() for word in ("gloo", "connection", "peer")
            ):
                raise
            raise LostRanksError(
                f"rank {self.number} of {self.count} has lost the others: {str(error)[:300]}",
                remedy="run the same command again; finished work is kept",
            ) from error

    def barrier(self) -> None:
        """Wait until every rank is here. Raises LostRanksError as `gather` does."""
        self.gather(None)


def rank_and_count() -> tuple[int, int]:
    """This process's number and how many there are, from the environment; (0, 1) when it is alone."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def ranks(device: str) -> Ranks:
    """This process's place. When it is alone nothing of torch.distributed is started.

    device: cpu or cuda, as params.yaml says. Call it once, in every rank: it waits for the others.
    """
    if rank_and_count()[1] == 1:
        return Ranks(0, 1, device)
    from accelerate import PartialState
    from accelerate.utils import check_cuda_p2p_ib_support

    if device == "cuda" and not check_cuda_p2p_ib_support():  # PartialState refuses these cards without:
        os.environ |= {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    # gloo on GPUs too: what passes between ranks is on the CPU, and where a rank dies in the middle gloo raises an
    # error, while NCCL waits ten minutes and aborts the process.
    state = PartialState(cpu=device == "cpu", backend="gloo", timeout=_PATIENCE)
    atexit.register(_leave)
    place = f"cuda:{state.local_process_index}" if device == "cuda" else "cpu"
    return Ranks(state.process_index, state.num_processes, place)


def _leave() -> None:
    """Close the connections. Otherwise the process ends in "terminate called" and SIGABRT, also after all went well."""
    import torch.distributed

    ignore_signals()
    torch.distributed.destroy_process_group()


def ignore_signals() -> None:
    """From here SIGTERM and SIGINT break nothing off: they come twice, and to all ranks once one of them fails."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
