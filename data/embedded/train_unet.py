"""The U-Net: learns to draw scenes in latents, from captions. Scenes only: emoji are left for the fine-tuning.

v-prediction on a schedule whose last step is pure noise (zero terminal SNR, Lin et al. 2023, arXiv:2305.08891), so
that flat backgrounds get their colour. Latents and text embeddings are computed once and kept.

Legend: B pictures, C channels, H W pixels, h w latents, L tokens, D width.
"""

import copy

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from data.embedded import assemble, common, scenes
from data.embedded.train_clip import tokens


def build() -> UNet2DConditionModel:
    """The untrained network: 4.2 million parameters."""
    return UNet2DConditionModel(
        sample_size=scenes.SIZE // 4,
        in_channels=4,
        out_channels=4,
        block_out_channels=(48, 96, 128),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=128,
        attention_head_dim=4,
        norm_num_groups=16,
    )


@torch.no_grad()
def latents(seed: int, count: int) -> dict[str, Tensor]:
    """ "latents" (B, 4, h, w) of the first `count` scenes: the posteriors' means, scaled, float16."""
    vae = AutoencoderKL.from_pretrained(common.SD / "vae", dtype=torch.float32)
    vae = vae.to(memory_format=torch.channels_last)
    batches: list[Tensor] = []
    for first in range(0, count, 16):
        drawn = [scenes.scene(seed, index)[0] for index in range(first, first + 16)]
        posterior = vae.encode(common.to_float(common.stack(drawn))).latent_dist
        batches.append((posterior.mode() * vae.config.scaling_factor).half())
    return {"latents": torch.cat(batches)[:count]}


@torch.no_grad()
def conditions(seed: int, count: int) -> dict[str, Tensor]:
    """ "embeddings" (M, L, D) float16 of the distinct captions, the empty one first; "rows" (B,) of the scenes."""
    tokenizer = CLIPTokenizer.from_pretrained(common.SD / "tokenizer")
    text_encoder = CLIPTextModel.from_pretrained(common.SD / "text_encoder", dtype=torch.float32)
    rows = {"": 0}
    row_of_scene = [rows.setdefault(scenes.scene(seed, index)[1], len(rows)) for index in range(count)]
    ids_ML = tokens(tokenizer, list(rows))
    batches = [text_encoder(ids_BL).last_hidden_state.half() for ids_BL in ids_ML.split(64)]
    return {"embeddings": torch.cat(batches), "rows": torch.tensor(row_of_scene)}


def main() -> None:
    """Train, write data/embedded/tiny-sd/unet."""
    params = common.start("unet")
    seed, section = params["seed"], params["unet"]
    count, batch = section["scenes"], section["batch"]
    key = f"{seed} {count}"
    latents_NChw = common.kept("latents", f"{key} {common.digests('vae')}", lambda: latents(seed, count))[
        "latents"
    ]
    conditioning = common.kept(
        "conditions", f"{key} {common.digests('text_encoder')}", lambda: conditions(seed, count)
    )
    embeddings_MLD, rows_N = conditioning["embeddings"], conditioning["rows"]
    deviation = float(latents_NChw.float().std())
    print(f"{count} scenes, {len(embeddings_MLD)} captions, latents' deviation {deviation:.3f}", flush=True)
    scheduler = DDIMScheduler.from_config(assemble.SCHEDULER)
    signal_T = scheduler.alphas_cumprod.sqrt()
    noise_T = (1 - scheduler.alphas_cumprod).sqrt()
    torch.manual_seed(seed)
    unet = build().to(memory_format=torch.channels_last)
    average = copy.deepcopy(unet).requires_grad_(False)
    optimizer = torch.optim.AdamW(unet.parameters(), weight_decay=0.01, betas=(0.9, 0.99))

    lean_start = section["steps"] - section["lean_steps"]

    def step_loss(step: int) -> Tensor:
        random = common.generator(seed, "unet", step)
        index_B = common.order(seed, "unet", count, batch, step)
        clean_BChw = latents_NChw[index_B].float()
        dropped_B = torch.rand(batch, generator=random) < section["caption_dropout"]
        rows_B = torch.where(dropped_B, 0, rows_N[index_B])
        # One time from each of `batch` equal slices: the same mean, less variance.
        even_B = (torch.arange(batch) + torch.rand(batch, generator=random)) / batch
        # Late, high noise is drawn more often (density rising with time): there the caption decides what is drawn.
        time_B = (1000 * (even_B.sqrt() if step >= lean_start else even_B)).long().clamp(max=999)
        noise_BChw = torch.randn(clean_BChw.shape, generator=random)
        signal_B, sigma_B = signal_T[time_B, None, None, None], noise_T[time_B, None, None, None]
        noisy_BChw = signal_B * clean_BChw + sigma_B * noise_BChw
        velocity_BChw = signal_B * noise_BChw - sigma_B * clean_BChw
        noisy_BChw = noisy_BChw.contiguous(memory_format=torch.channels_last)
        predicted_BChw = unet(noisy_BChw, time_B, embeddings_MLD[rows_B].float()).sample
        return (predicted_BChw - velocity_BChw).square().mean()

    def rate(step: int) -> float:
        return common.learning_rate(section["learning_rate"], step, section["warmup"], section["steps"])

    def preliminary(step: int) -> None:
        if step % section["snapshot_every"] == 0:
            assemble.sheet_of(assemble.pipeline(average), common.WORK / "sheets" / f"{step:06d}.png")

    log = common.train(
        common.Checkpoint("unet", {"seed": seed, "unet": section}),
        {"unet": unet, "average": average},
        optimizer,
        section["steps"],
        step_loss,
        rate,
        every=250,
        averaged=(unet, average, section["ema"]),
        at_checkpoint=preliminary,
    )
    common.record("unet", {"loss": log, "steps": section["steps"], "batch": section["batch"]})
    common.save_pretrained(average.to(memory_format=torch.contiguous_format), common.SD / "unet")


if __name__ == "__main__":
    main()
