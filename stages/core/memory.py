"""Out of memory, in plain words."""

from collections.abc import Generator
from contextlib import contextmanager

import torch

from stages.core.errors import MachineError


@contextmanager
def explained(what: str, remedy: str) -> Generator[None]:
    """Turn running out of memory inside into a MachineError. Nothing is made smaller by itself: it would change the bytes.

    what: the work, as in "encoding 16 pictures of 512 x 512". remedy: the smaller value to try.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MachineError(f"{what} needs more memory than there is", remedy=remedy) from error
    except RuntimeError as error:
        # Of the CPU's allocator, which has no class of its own.
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise MachineError(f"{what} needs more memory than there is", remedy=remedy) from error
