"""Room on the disk, before the work and not in the middle of it."""

import shutil
from collections import defaultdict
from pathlib import Path

from stages.core.errors import StoreError


def check_space(needs: list[tuple[Path, int]]) -> None:
    """Raise StoreError when a file system has fewer bytes free than the folders on it will be given.

    needs: folders (they need not exist yet), each with its bytes.
    """
    free: dict[int, int] = {}
    by_disk: dict[int, list[tuple[Path, int]]] = defaultdict(list)
    for folder, size in needs:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        by_disk[there.stat().st_dev].append((folder, size))
        free[there.stat().st_dev] = shutil.disk_usage(there).free
    for disk, parts in by_disk.items():
        needed = sum(size for _, size in parts)
        if needed > free[disk]:
            raise StoreError(
                f"{' and '.join(str(folder) for folder, _ in parts)} need {size_text(needed)} on a disk with "
                f"{size_text(free[disk])} free",
                remedy="free space (`python -m stages.cli store prune` helps), or keep less: encode.dtype float16",
            )


def size_text(size: int) -> str:
    """`size` bytes as people read them: 999 bytes, 12.3 kB, 4.5 MB, 6.7 GB."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} bytes"
