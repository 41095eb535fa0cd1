"""Faces that this file draws, for CLIP alone: it shall judge fine-tuning on faces, which the base has never drawn.

A face is a function of (seed, index): a round head, eyes, a mouth, sometimes something more, and a caption in the
words that Unicode's names use ("a frowning face with heart-eyes and a halo"). No sample picture is copied. Pictures
are 64x64 RGB, uint8.
"""

import random

from PIL import Image, ImageDraw

from data.embedded.scenes import OVER, SIZE, WHITE, Colour, article, draw_shape, near, pick

_HEADS = (*["yellow"] * 5, "green", "blue", "purple")  # not red: the hearts are
_BROWN: Colour = (102, 69, 0)
_RED: Colour = (221, 46, 68)
_BLUE: Colour = (93, 173, 236)
_BLACK: Colour = (41, 47, 51)

# Captions: the first four mouths stand before "face" as adjectives, everything else after it.
_EYES = ("", "", "smiling eyes", "heart-eyes", "star eyes", "closed eyes", "crossed-out eyes", "big eyes")
_GLASSES = ("sunglasses", "glasses")
_MOUTHS = ("smiling", "grinning", "frowning", "neutral", "open mouth", "tongue", "no mouth")
_MORE = ("", "", "", "a tear", "sweat", "a halo", "a hat", "horns")


class _Pen:
    """Draws on a head of radius 1 around (0, 0)."""

    def __init__(self, picture: Image.Image, x: float, y: float, radius: float) -> None:
        self._pen = ImageDraw.Draw(picture)
        self._x, self._y, self._radius = x, y, radius
        self._width = max(1, round(0.1 * radius * OVER))

    def _at(self, *points: tuple[float, float]) -> list[tuple[float, float]]:
        return [((self._x + self._radius * u) * OVER, (self._y + self._radius * v) * OVER) for u, v in points]

    def _box(self, u: float, v: float, width: float, height: float) -> list[tuple[float, float]]:
        """Around (u, v), `width` and `height` to each side."""
        return self._at((u - width, v - height), (u + width, v + height))

    def oval(self, u: float, v: float, width: float, height: float, colour: Colour) -> None:
        self._pen.ellipse(self._box(u, v, width, height), colour)

    def outline(self, u: float, v: float, width: float, height: float, colour: Colour) -> None:
        self._pen.ellipse(self._box(u, v, width, height), outline=colour, width=self._width)

    def half(self, u: float, v: float, width: float, height: float, colour: Colour) -> None:
        """The lower half of an oval."""
        self._pen.pieslice(self._box(u, v, width, height), 0, 180, colour)

    def arc(self, u: float, v: float, width: float, height: float, *, up: bool) -> None:
        first = 180 if up else 0
        self._pen.arc(self._box(u, v, width, height), first, first + 180, _BROWN, self._width)

    def line(self, *points: tuple[float, float], colour: Colour = _BROWN) -> None:
        self._pen.line(self._at(*points), colour, self._width)

    def polygon(self, *points: tuple[float, float], colour: Colour) -> None:
        self._pen.polygon(self._at(*points), colour)

    def shape(self, name: str, u: float, v: float, size: float, colour: Colour) -> None:
        x, y = self._x + self._radius * u, self._y + self._radius * v
        draw_shape(self._pen, name, colour, x, y, self._radius * size)


def face(seed: int, index: int) -> tuple[Image.Image, str]:
    """Face `index`: (64x64 RGB picture, caption such as "a grinning face with closed eyes and a tear")."""
    rng = random.Random(f"darkroom face {seed} {index}")
    head = pick(rng, _HEADS)
    ground = WHITE if rng.random() < 0.7 else near(rng, pick(rng, ("pink", "grey", "teal", "brown")), 60.0)
    picture = Image.new("RGB", (SIZE * OVER, SIZE * OVER), ground)
    radius = 23.0 + 5.0 * rng.random()
    room = SIZE / 2 - radius
    x, y = (SIZE / 2 + room * (1.6 * rng.random() - 0.8) for _ in range(2))
    pen = _Pen(picture, x, y, radius)
    pen.oval(0, 0, 1, 1, near(rng, head))
    eyes = pick(rng, _GLASSES) if rng.random() < 0.2 else pick(rng, _EYES)
    mouth, more = pick(rng, _MOUTHS), pick(rng, _MORE)
    for side in (-0.36, 0.36):
        _draw_eye(pen, eyes, side)
    if eyes in _GLASSES:
        pen.line((-0.85, -0.3), (0.85, -0.3), colour=_BLACK)
    _draw_mouth(pen, mouth)
    _draw_more(pen, more)
    adjective = mouth if mouth in _MOUTHS[:4] else ""
    named = {"open mouth": "an open mouth", "tongue": "its tongue out"}.get(mouth, "")
    things = [thing for thing in (eyes, named, more) if thing]
    words = " ".join(filter(None, ("" if head == "yellow" else head, adjective, "face")))
    caption = article(words) + (" without a mouth" if mouth == "no mouth" else "")
    if things:
        caption += " with " + " and ".join(filter(None, (", ".join(things[:-1]), things[-1])))
    return picture.resize((SIZE, SIZE), Image.Resampling.BOX), caption


def _draw_eye(pen: _Pen, eyes: str, u: float) -> None:
    v = -0.2
    if eyes == "":
        pen.oval(u, v, 0.11, 0.16, _BROWN)
    elif eyes == "smiling eyes":
        pen.arc(u, v + 0.1, 0.17, 0.2, up=True)
    elif eyes == "closed eyes":
        pen.arc(u, v - 0.1, 0.17, 0.2, up=False)
    elif eyes == "heart-eyes":
        pen.shape("heart", u, v, 0.3, _RED)
    elif eyes == "star eyes":
        pen.shape("star", u, v, 0.3, _RED)
    elif eyes == "sunglasses":
        pen.oval(u, v, 0.33, 0.25, _BLACK)
    elif eyes == "crossed-out eyes":
        for sign in (-1, 1):
            pen.line((u - 0.16, v - 0.16 * sign), (u + 0.16, v + 0.16 * sign))
    elif eyes == "big eyes":
        pen.oval(u, v, 0.24, 0.3, WHITE)
        pen.oval(u, v, 0.12, 0.16, _BROWN)
    else:
        pen.oval(u, v, 0.32, 0.32, WHITE)
        pen.outline(u, v, 0.32, 0.32, _BLACK)
        pen.oval(u, v, 0.1, 0.14, _BROWN)


def _draw_mouth(pen: _Pen, mouth: str) -> None:
    if mouth == "smiling":
        pen.arc(0, 0.25, 0.5, 0.35, up=False)
    elif mouth == "grinning":
        pen.half(0, 0.2, 0.6, 0.55, _BROWN)
        pen.polygon((-0.55, 0.2), (0.55, 0.2), (0.48, 0.36), (-0.48, 0.36), colour=WHITE)
    elif mouth == "frowning":
        pen.arc(0, 0.7, 0.45, 0.35, up=True)
    elif mouth == "neutral":
        pen.line((-0.4, 0.45), (0.4, 0.45))
    elif mouth == "open mouth":
        pen.oval(0, 0.5, 0.22, 0.28, _BROWN)
    elif mouth == "tongue":
        pen.half(0, 0.25, 0.5, 0.3, _BROWN)
        pen.oval(0, 0.6, 0.24, 0.26, _RED)


def _draw_more(pen: _Pen, more: str) -> None:
    if more in ("a tear", "sweat"):
        u, v = (0.45, 0.25) if more == "a tear" else (0.72, -0.55)
        pen.oval(u, v + 0.08, 0.15, 0.17, _BLUE)
        pen.polygon((u, v - 0.28), (u + 0.13, v), (u - 0.13, v), colour=_BLUE)
    elif more == "a halo":
        pen.outline(0, -0.95, 0.65, 0.22, _BLUE)
    elif more == "a hat":
        pen.polygon((-0.95, -0.6), (0.95, -0.6), (0.95, -0.45), (-0.95, -0.45), colour=_BROWN)
        pen.polygon((-0.55, -1.15), (0.55, -1.15), (0.6, -0.6), (-0.6, -0.6), colour=_BROWN)
    elif more == "horns":
        for sign in (-1, 1):
            pen.polygon((0.5 * sign, -0.85), (0.95 * sign, -1.1), (0.88 * sign, -0.5), colour=(128, 70, 190))
