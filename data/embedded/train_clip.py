"""A tiny CLIP: its text tower conditions the U-Net, both towers together judge pictures (CLIP score, distances).

A batch has scenes, drawn faces, and emoji outside the sample subset, so that it knows emoji but not these. The scenes
come in groups that share background and colours: to tell them apart both towers must learn shape, size and place,
where at random the colours alone would do. Both towers learn together first; then the text tower is frozen and
written as the pipeline's text encoder, so that the U-Net can be trained on it while the vision tower goes on alone,
towards the frozen texts.

Legend: B pictures, A alike, C channels, H W pixels, L tokens.
"""

import copy

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel, CLIPTextModel, CLIPTokenizer

from data.embedded import common, faces, scenes
from stages.core.store import write_atomic, write_json

_HELD_OUT = 20  # every 20th emoji is kept out of training
_CHECKED = 256  # scenes and faces that are drawn besides, to measure on


def build(tokenizer: CLIPTokenizer) -> CLIPModel:
    """The untrained network: 0.8 million parameters for texts, 0.5 million for pictures."""
    tower = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "projection_dim": 128}
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    texts = (
        tower
        | special
        | {
            "vocab_size": len(tokenizer),
            "max_position_embeddings": tokenizer.model_max_length,
            "num_hidden_layers": 3,
        }
    )
    pictures = tower | {"image_size": scenes.SIZE, "patch_size": 8, "num_hidden_layers": 3}
    return CLIPModel(CLIPConfig(text_config=texts, vision_config=pictures, projection_dim=128))


def tokens(tokenizer: CLIPTokenizer, captions: list[str]) -> Tensor:
    """Captions as ids (B, L), int64, padded to the tokenizer's length."""
    return tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt")["input_ids"]


def emoji(seed: int, variants: int) -> tuple[Tensor, list[str]]:
    """All training emoji as pictures (items, variants, 3, 64, 64), uint8, and their captions."""
    items = scenes.emoji_items()
    drawn: list[Tensor] = []
    for index, (path, _) in enumerate(items):
        graphic = Image.open(path)
        drawn.append(
            common.stack(scenes.emoji_picture(graphic, seed, index, variant) for variant in range(variants))
        )
    return torch.stack(drawn), [caption for _, caption in items]


@torch.no_grad()
def similarities(clip: CLIPModel, pictures_BCHW: Tensor, ids_BL: Tensor) -> Tensor:
    """Cosines (B pictures, B texts) between uint8 pictures and token ids."""
    clip.eval()
    vision = [clip.vision_model(common.to_float(batch)).pooler_output for batch in pictures_BCHW.split(64)]
    pictures_BD = functional.normalize(clip.visual_projection(torch.cat(vision)), dim=-1)
    texts = [clip.text_model(batch).pooler_output for batch in ids_BL.split(64)]
    texts_BD = functional.normalize(clip.text_projection(torch.cat(texts)), dim=-1)
    clip.train()
    return pictures_BD @ texts_BD.T


def retrieval(scores_BB: Tensor) -> dict[str, float]:
    """R@1 and R@5 from picture to text, and 100 x (mean matched - mean mismatched cosine)."""
    count = len(scores_BB)
    rank_B = (scores_BB > scores_BB.diagonal()[:, None]).sum(1)
    matched = scores_BB.diagonal().mean()
    mismatched = (scores_BB.sum() - scores_BB.diagonal().sum()) / (count * (count - 1))
    return {
        "count": count,
        "R@1": round(float((rank_B < 1).float().mean()), 4),
        "R@5": round(float((rank_B < 5).float().mean()), 4),
        "matched_minus_mismatched": round(100 * float(matched - mismatched), 2),
    }


def among_alike(scores_BB: Tensor, alike: int) -> float:
    """How often a scene's own caption is the best of its group's, where neighbours differ in shape, size, place alone."""
    own_BA = torch.arange(len(scores_BB))[:, None] // alike * alike + torch.arange(alike)
    best_B = scores_BB.gather(1, own_BA).amax(1)
    return round(float((scores_BB.diagonal() >= best_B).float().mean()), 4)


def main() -> None:
    """Train, write data/embedded/tiny-clip and data/embedded/tiny-sd/text_encoder."""
    params = common.start()
    seed, section = params["seed"], params["clip"]
    tokenizer = CLIPTokenizer.from_pretrained(common.SD / "tokenizer")
    count, alike = section["scenes"], section["alike"]
    drawn = [scenes.scene(seed, index, alike) for index in range(count + _CHECKED)]
    scenes_BCHW = common.stack(picture for picture, _ in drawn)
    scene_ids_BL = tokens(tokenizer, [caption for _, caption in drawn])
    face_count = section["faces"]
    drawn = [faces.face(seed, index) for index in range(face_count + _CHECKED)]
    faces_BCHW = common.stack(picture for picture, _ in drawn)
    face_ids_BL = tokens(tokenizer, [caption for _, caption in drawn])
    emoji_NVCHW, captions = emoji(seed, section["emoji_variants"])
    emoji_ids_BL = tokens(tokenizer, captions)
    learnt = torch.tensor([index for index in range(len(captions)) if index % _HELD_OUT])
    turns = torch.tensor([not {"left", "right"} & set(caption.split()) for caption in captions])

    samples = scenes.sample_items()
    sample_pictures = common.stack(scenes.compose(Image.open(path), scenes.WHITE) for path, _, _ in samples)
    checks = {
        "scenes": (scenes_BCHW[count:], scene_ids_BL[count:]),
        "faces": (faces_BCHW[face_count:], face_ids_BL[face_count:]),
        "emoji": (emoji_NVCHW[::_HELD_OUT, 0], emoji_ids_BL[::_HELD_OUT]),
        "samples": (sample_pictures, tokens(tokenizer, [caption for _, _, caption in samples])),
        "emoji_learnt": (emoji_NVCHW[learnt[::5], 0], emoji_ids_BL[learnt[::5]]),
    }

    torch.manual_seed(seed)
    clip = build(tokenizer)
    decayed = [weight for weight in clip.parameters() if weight.ndim > 1]
    others = [weight for weight in clip.parameters() if weight.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": section["weight_decay"]},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98))

    emoji_batch = section["emoji_batch"]
    groups_per_batch = section["scene_batch"] // alike
    both_steps, steps = section["steps"], section["steps"] + section["vision_steps"]

    def rate(step: int) -> float:
        if step < both_steps:
            return common.learning_rate(
                section["learning_rate"], step, section["warmup"], section["decay_steps"]
            )
        peak, decay_steps = section["vision_learning_rate"], section["vision_decay_steps"]
        cosine = common.learning_rate(peak, step - both_steps, section["warmup"], decay_steps)
        return cosine * min(1.0, (steps - step) / section["cooldown_steps"])

    def step_loss(step: int) -> Tensor:
        if step >= both_steps:
            clip.text_model.requires_grad_(False)
            clip.text_projection.requires_grad_(False)
        random = common.generator(seed, "clip", step)
        groups_B = common.order(seed, "clip scenes", count // alike, groups_per_batch, step)
        scene_B = (groups_B[:, None] * alike + torch.arange(alike)).flatten()
        face_B = common.order(seed, "clip faces", face_count, section["face_batch"], step)
        emoji_B = learnt[common.order(seed, "clip emoji", len(learnt), emoji_batch, step)]
        variant_B = torch.randint(0, emoji_NVCHW.shape[1], (emoji_batch,), generator=random)
        emoji_BCHW = emoji_NVCHW[emoji_B, variant_B]
        flip_B = (torch.rand(emoji_batch, generator=random) < 0.5) & turns[emoji_B]
        emoji_BCHW = torch.where(flip_B[:, None, None, None], emoji_BCHW.flip(3), emoji_BCHW)
        pictures = common.to_float(torch.cat((scenes_BCHW[scene_B], faces_BCHW[face_B], emoji_BCHW)))
        ids_BL = torch.cat((scene_ids_BL[scene_B], face_ids_BL[face_B], emoji_ids_BL[emoji_B]))
        # Texts see only what is before them, and end at their first end token: the padding may go.
        ids_BL = ids_BL[:, : int((ids_BL != tokenizer.pad_token_id).sum(1).max()) + 1]
        with torch.no_grad():
            clip.logit_scale.clamp_(max=4.6)
        logits_BB = clip(input_ids=ids_BL, pixel_values=pictures).logits_per_image
        # Equal captions are right answers too, not mistakes.
        same_BB = (ids_BL[:, None] == ids_BL[None]).all(-1).float()
        wanted_BB = same_BB / same_BB.sum(1, keepdim=True)
        both = functional.cross_entropy(logits_BB, wanted_BB) + functional.cross_entropy(
            logits_BB.T, wanted_BB
        )
        return both / 2

    def measure(model: CLIPModel) -> dict[str, dict[str, float]]:
        figures: dict[str, dict[str, float]] = {}
        for kind, check in checks.items():
            scores_BB = similarities(model, *check)
            figures[kind] = retrieval(scores_BB)
            if kind == "scenes":
                figures[kind][f"best of {alike} alike"] = among_alike(scores_BB, alike)
        return figures

    def report(step: int) -> None:
        if step == both_steps:
            write(copy.deepcopy(clip))
        for kind, figures in measure(clip).items():
            print(" ", kind, figures, flush=True)

    log = common.train(
        common.Checkpoint("clip", {"seed": seed, "clip": section}),
        {"clip": clip},
        optimizer,
        steps,
        step_loss,
        rate,
        every=100,
        at_checkpoint=report,
    )
    write(clip)
    half_precision = CLIPModel.from_pretrained(common.CLIP, dtype=torch.float32)
    figures = measure(half_precision)
    common.record("clip", {"retrieval": figures, "loss": log})
    print(figures)


def write(clip: CLIPModel) -> None:
    """Write tiny-clip and, from the same weights, the pipeline's text encoder."""
    common.save_pretrained(clip, common.CLIP)
    for path in (common.SD / "tokenizer").iterdir():
        write_atomic(common.CLIP / path.name, path.read_bytes())
    preprocessor = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": scenes.SIZE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": scenes.SIZE, "width": scenes.SIZE},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    write_json(common.CLIP / "preprocessor_config.json", preprocessor)
    text_encoder = CLIPTextModel.from_pretrained(common.CLIP, dtype=torch.float16)
    common.save_pretrained(text_encoder, common.SD / "text_encoder")


if __name__ == "__main__":
    main()
