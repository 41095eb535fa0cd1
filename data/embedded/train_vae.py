"""The autoencoder: 64x64 pictures to 4x16x16 latents and back. Learnt on crops first, then on whole pictures.

Afterwards the latents of the training pictures are made white (mean 0, no correlation between the four channels, one
common scale) by a linear map that is folded into the first convolution after the encoder and the last before the
decoder: the pictures do not change, the U-Net has less to learn. The scaling factor is 1 / the measured deviation.

Legend: B pictures, C channels, H W pixels, h w latents.
"""

import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor

from data.embedded import common, scenes

_HELD_OUT = 20  # every 20th emoji and the scenes after the training ones measure the reconstruction


def build() -> AutoencoderKL:
    """The untrained network: 0.68 million parameters."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
        sample_size=scenes.SIZE,
        scaling_factor=1.0,
    )


def pictures(seed: int, scene_count: int, variants: int) -> Tensor:
    """Training pictures (B, 3, 64, 64), uint8: scenes, then variants of the emoji that are not held out."""
    drawn = [scenes.scene(seed, index)[0] for index in range(scene_count)]
    for index, (path, _) in enumerate(scenes.emoji_items()):
        if index % _HELD_OUT:
            graphic = Image.open(path)
            drawn += [scenes.emoji_picture(graphic, seed, index, variant) for variant in range(variants)]
    return common.stack(drawn)


def held_out(seed: int, first_scene: int) -> dict[str, Tensor]:
    """Pictures (B, 3, 64, 64), uint8, that the autoencoder never sees, by kind."""
    emoji = [Image.open(path) for path, _ in scenes.emoji_items()[::_HELD_OUT]]
    samples = [Image.open(path) for path, _, _ in scenes.sample_items()]
    return {
        "scenes": common.stack(scenes.scene(seed, first_scene + index)[0] for index in range(128)),
        "emoji": common.stack(scenes.compose(graphic, scenes.WHITE) for graphic in emoji),
        "samples": common.stack(scenes.compose(graphic, scenes.WHITE) for graphic in samples),
    }


@torch.no_grad()
def psnr(vae: AutoencoderKL, pictures_BCHW: Tensor) -> float:
    """Mean over pictures of the reconstruction's signal-to-noise ratio in dB (peak 255, from the posterior's mean)."""
    ratios: list[Tensor] = []
    for batch in pictures_BCHW.split(32):
        wanted = common.to_float(batch)
        got = vae.decode(vae.encode(wanted).latent_dist.mode()).sample.clamp(-1, 1)
        ratios.append(-10 * torch.log10(((got - wanted) / 2).square().mean(dim=(1, 2, 3))))
    return float(torch.cat(ratios).mean())


@torch.no_grad()
def whiten(vae: AutoencoderKL, pictures_BCHW: Tensor) -> float:
    """Make the latents of these pictures white, in place; return the scaling factor."""
    vae.eval()
    moments = [vae.encode(common.to_float(batch)).latent_dist.mode() for batch in pictures_BCHW.split(32)]
    latents_NC = torch.cat(moments).permute(0, 2, 3, 1).reshape(-1, 4).double()
    mean_C = latents_NC.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(latents_NC.T))
    # ZCA: the white latents stay as near to the old ones as can be; the old overall deviation is kept.
    scale = float(values.mean().sqrt())
    forward_CC = vectors @ torch.diag(scale / values.sqrt()) @ vectors.T
    backward_CC = torch.linalg.inv(forward_CC)
    before, after = vae.quant_conv, vae.post_quant_conv
    weight, bias = before.weight.double()[:, :, 0, 0], before.bias.double()
    weight[:4] = forward_CC @ weight[:4]
    bias[:4] = forward_CC @ (bias[:4] - mean_C)
    bias[4:] += 2 * float(torch.log(forward_CC.diagonal().mean()))  # the log-variance follows, roughly
    before.weight.copy_(weight[:, :, None, None])
    before.bias.copy_(bias)
    weight = after.weight.double()[:, :, 0, 0]
    after.bias.copy_(after.bias.double() + weight @ mean_C)
    after.weight.copy_((weight @ backward_CC)[:, :, None, None])
    return 1.0 / scale


def main() -> None:
    """Train, whiten, write data/embedded/tiny-sd/vae."""
    params = common.start()
    seed, section = params["seed"], params["vae"]
    data_BCHW = pictures(seed, section["scenes"], section["emoji_variants"])
    print(f"{len(data_BCHW)} pictures", flush=True)
    torch.manual_seed(seed)
    vae = build().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(vae.parameters(), weight_decay=0.0, betas=(0.9, 0.99))
    crop_steps, steps = section["crop_steps"], section["crop_steps"] + section["full_steps"]

    def step_loss(step: int) -> Tensor:
        random = common.generator(seed, "vae", step)
        if step < crop_steps:
            batch = data_BCHW[common.order(seed, "vae", len(data_BCHW), 16, step)]
            top, left = (int(corner) for corner in torch.randint(0, 33, (2,), generator=random))
            batch = batch[:, :, top : top + 32, left : left + 32]
        else:
            batch = data_BCHW[common.order(seed, "vae whole", len(data_BCHW), 4, step)]
        if step % 3 == 0:  # more colours than the palette has
            batch = batch[:, torch.randperm(3, generator=random)]
        if step % 2 == 0:
            batch = batch.flip(3)
        wanted = common.to_float(batch)
        posterior = vae.encode(wanted).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=random)
        error = vae.decode(posterior.mean + posterior.std * noise).sample - wanted
        divergence = 0.5 * (posterior.mean.square() + posterior.var - 1.0 - posterior.logvar).mean()
        return error.abs().mean() + error.square().mean() + section["kl"] * divergence

    def rate(step: int) -> float:
        cosine = common.learning_rate(
            section["learning_rate"], step, section["warmup"], section["decay_steps"]
        )
        return cosine * min(1.0, (steps - step) / section["cooldown_steps"])

    checks = {kind: batch[:64] for kind, batch in held_out(seed, section["scenes"]).items()}

    def report(step: int) -> None:
        print({kind: round(psnr(vae, batch), 2) for kind, batch in checks.items()}, flush=True)

    log = common.train(
        common.Checkpoint("vae", {"seed": seed, "vae": section}),
        {"vae": vae},
        optimizer,
        steps,
        step_loss,
        rate,
        every=500,
        at_checkpoint=report,
    )
    factor = whiten(vae, data_BCHW[::4])
    vae.register_to_config(scaling_factor=round(factor, 4))
    vae = vae.to(memory_format=torch.contiguous_format)
    figures = {kind: round(psnr(vae, batch), 2) for kind, batch in held_out(seed, section["scenes"]).items()}
    common.record("vae", {"psnr_dB": figures, "scaling_factor": round(factor, 4), "loss": log})
    print(figures, factor)
    common.save_pretrained(vae, common.SD / "vae")


if __name__ == "__main__":
    main()
