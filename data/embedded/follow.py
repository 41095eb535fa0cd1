"""How well the base follows a prompt: it draws sets of alternatives, and the CLIP must tell which is which.

"A big red star on a plain white background" and the same with eleven other shapes are one set: every picture should be
nearer to its own caption than to the eleven others. The judge is tiny-clip, whose own share of right answers on true
scenes is in figures.json (`best of 8 alike`).
"""

import torch
from diffusers import StableDiffusionPipeline
from transformers import CLIPModel, CLIPTokenizer

from data.embedded import common, scenes
from data.embedded.train_clip import similarities, tokens

_GROUNDS = ("on a plain blue background", "on a blue table", "on blue stripes", "on blue checks")


def sets() -> dict[str, list[list[str]]]:
    """By what differs: sets of captions that differ in this alone."""
    plain = "on a plain white background"
    a = scenes.article
    return {
        "shape": [
            [f"a big {colour} {shape} {plain}" for shape in scenes.SHAPES]
            for colour in ("red", "blue", "green")
        ],
        "colour": [
            [f"{a(colour)} {shape} {plain}" for colour in scenes.COLOURS]
            for shape in ("ball", "star", "heart")
        ],
        "background": [
            [f"a red {shape} {ground}" for ground in _GROUNDS]
            for shape in ("ball", "square", "triangle", "star", "heart", "moon")
        ],
        "place": [
            [f"a small {colour} {shape} {plain}, {place}" for place in scenes.SIDES if place]
            for colour in ("red", "blue", "black")
            for shape in ("ball", "star")
        ],
        "size": [[f"a {size} blue {shape} {plain}" for size in ("small", "big")] for shape in scenes.SHAPES],
    }


@torch.no_grad()
def shares(pipe: StableDiffusionPipeline, clip: CLIPModel, tokenizer: CLIPTokenizer) -> dict[str, float]:
    """Share of right answers, 0..1, by what differs; the noise is fixed."""
    found: dict[str, float] = {}
    for kind, captions_of in sets().items():
        right, count = 0, 0
        for number, captions in enumerate(captions_of):
            drawn = common.draw(pipe, captions, 100 * number)
            scores_BB = similarities(clip, common.stack(drawn), tokens(tokenizer, captions))
            right += int((scores_BB.argmax(1) == torch.arange(len(captions))).sum())
            count += len(captions)
        found[kind] = round(right / count, 3)
    return found
