"""Rows as CSV, with the same bytes everywhere."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any


def csv_bytes(rows: Sequence[Mapping[str, Any]], names: Sequence[str] | None = None) -> bytes:
    """UTF-8 CSV with lines that end in \\n; floats print so that they read back the same.

    names: the columns in order; else those of the first row. What a row lacks stays empty.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]) if names is None else names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
