"""CSV bytes by hand."""

import math

from stages.core.tables import csv_bytes


def test_floats_read_back_the_same() -> None:
    rows = [{"step": 1, "loss": 0.1 + 0.2}]
    assert csv_bytes(rows, ("step", "loss")) == b"step,loss\n1,0.30000000000000004\n"


def test_columns_of_the_first_row_and_gaps() -> None:
    rows = [{"name": "a, b", "loss": 1.0}, {"name": 'say "é"\n'}]
    assert csv_bytes(rows) == 'name,loss\n"a, b",1.0\n"say ""é""\n",\n'.encode()


def test_not_a_number_and_no_rows() -> None:
    assert csv_bytes([{"loss": math.nan}]) == b"loss\nnan\n"
    assert csv_bytes([], ("step", "loss")) == b"step,loss\n"
