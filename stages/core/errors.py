"""One tree of errors. Each names the file, the line or the value, and says what to do about it."""


def escaped(text: str, *, keep: str = "") -> str:
    """`text` with what is not printable, but for `keep`, as escapes: a terminal must not obey a file's name or a caption."""
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
        for letter in text
    )


class DarkroomError(Exception):
    """What went wrong, in plain words, and the remedy.

    message: names the culprit (file, line, field or value).
    remedy: what the reader can do now; shown on its own line.
    """

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return escaped(f"{self.message}\n  remedy: {self.remedy}", keep="\n")


class ConfigError(DarkroomError):
    """params.yaml (or a command's option) holds something that cannot be used."""


class SourceError(DarkroomError):
    """The source folder, its metadata or its captions cannot be used as they are."""


class PictureError(DarkroomError):
    """One picture cannot be used; `reason` is the code it is quarantined under."""

    def __init__(self, reason: str, message: str, *, remedy: str) -> None:
        super().__init__(message, remedy=remedy)
        self.reason = reason

    def detail(self, path: object) -> str:
        """The message without the path that it begins with: what is kept by content must not know a name."""
        return self.message.removeprefix(f"{path} ")


class BaseModelError(DarkroomError):
    """The base model is missing, incomplete, not what was recorded, or not allowed."""


class StoreError(DarkroomError):
    """The store or an out on disk is damaged, full or not writable."""


class LockedError(StoreError):
    """Another process is doing the same work; the message holds its pid."""


class TrainingError(DarkroomError):
    """Training cannot go on: a loss that is not a number, settings that contradict each other."""


class ParityError(DarkroomError):
    """An exported artefact does not compute what the trained model computes."""


class MachineError(DarkroomError):
    """This machine lacks what the parameters ask for (a GPU, an instruction set, an engine)."""
