"""Errors are printed; names in them come from anywhere."""

from stages.core.errors import DarkroomError, escaped


def test_half_a_surrogate_pair_can_be_printed() -> None:
    assert escaped("a\ud800\x00b c") == "a\\ud800\\x00b c"


def test_what_is_kept() -> None:
    assert escaped("ü 笑\n\t\u202e", keep="\n") == "ü 笑\n\\t\\u202e"


def test_a_terminal_does_not_obey_an_error() -> None:
    error = DarkroomError("\x1b[31mred.png is bad:\n  line 2", remedy="rename \x07")
    assert str(error) == "\\x1b[31mred.png is bad:\n  line 2\n  remedy: rename \\x07"
