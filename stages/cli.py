"""The commands that are not stages: `python -m stages.cli`, installed as `darkroom`."""

import importlib
import subprocess
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

from stages.core.errors import ConfigError, DarkroomError, LockedError
from stages.harness.config import (
    CORRECT,
    PARAMS,
    STAGES,
    did_you_mean,
    load_section,
    load_shared,
    read_params,
)
from stages.harness.run import check_device, describe_os_error, project_root, store_root


def plain_errors(command: Callable[..., None]) -> Callable[..., None]:
    """A DarkroomError, and a file that cannot be read or written, becomes its message and exit code 1."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (DarkroomError, OSError) as error:
            told = describe_os_error(error, chosen=True) if isinstance(error, OSError) else error
            click.echo(f"error: {told}", err=True)
            sys.exit(1)

    return wrapped


class Group(click.Group):
    """A group that knows what a mistyped command may have meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's; the error names the nearest command, and all of them."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            names = self.list_commands(ctx)
            raise click.UsageError(
                f"no command is called {name!r}"
                + (did_you_mean(name, names) or ".")
                + f" The commands are {', '.join(names)}.",
                ctx,
            )
        return super().resolve_command(ctx, args)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Darkroom: reproducible fine-tuning of Stable Diffusion as a DVC pipeline.

    The pipeline itself is run with `dvc repro`; these commands are what stands around it.
    """


@main.command()
@click.option(
    "--device", type=click.Choice(["cpu", "cuda"]), help="Ask for this device instead of params.yaml's."
)
@plain_errors
def doctor(device: str | None) -> None:
    """Show what this machine has, and where the stages will run."""
    from stages.harness import doctor as checks

    for what, finding in checks.report(project_root()):
        click.echo(f"{what:>12}  {finding}")
    params = read_params()
    shared = load_shared(params)
    check_sections(params)
    click.echo("params.yaml: every section can be read")
    click.echo(checks.where(device or shared.device, shared.runtime))


def check_sections(params: dict[str, Any]) -> None:
    """Read the sections of all stages; raises one ConfigError with what is wrong in any of them."""
    problems: list[str] = []
    for name in STAGES:
        config = getattr(importlib.import_module(f"stages.{name}"), f"{name.capitalize()}Config")
        try:
            load_section(params, name, config)
        except ConfigError as error:
            problems.append(error.message)
    if problems:
        raise ConfigError("\n  ".join(problems), remedy=CORRECT)


@main.command("sample-data")
@click.option("--folder", type=click.Path(path_type=Path), default=Path("data/pictures"), show_default=True)
@click.option("--if-missing", is_flag=True, help="Do nothing when the folder already holds something.")
@plain_errors
def sample_data(folder: Path, if_missing: bool) -> None:
    """Fill the pictures' folder with the sample pictures (Twemoji, CC-BY 4.0) and their captions."""
    from stages.harness.samples import write_samples

    if if_missing and folder.is_dir() and any(folder.iterdir()):
        return
    click.echo(f"{write_samples(folder)} captioned pictures in {folder}")


@main.command()
@click.argument("preset")
@plain_errors
def params(preset: str) -> None:
    """Rewrite params.yaml by PRESET, a file of params/ (its comments are kept)."""
    from stages.harness.presets import apply_preset

    apply_preset(PARAMS, Path("params"), preset)
    click.echo(f"params.yaml now holds preset {preset}; `git diff params.yaml` shows what changed")


@main.group(cls=Group)
def tracking() -> None:
    """MLflow: complete the records, open the page."""


@tracking.command()
@click.option("--timeout", type=float, default=120.0, show_default=True, help="Seconds to wait at most.")
@plain_errors
def sync(timeout: float) -> None:
    """Wait until everything that the stages recorded is in MLflow."""
    from stages.harness.tracking import sync as synchronise

    report = synchronise(project_root(), timeout)
    click.echo(report)
    if report.left:
        sys.exit(1)


@tracking.command()
@click.option("--port", type=int, default=5000, show_default=True)
@plain_errors
def ui(port: int) -> None:
    """Open MLflow's page on the local records (http://127.0.0.1:PORT); end it with Ctrl-C."""
    from stages.harness.tracking import ui_command, ui_environment

    click.echo(f"MLflow is at http://127.0.0.1:{port} in a few seconds; Ctrl-C ends it")
    try:
        code = subprocess.call(ui_command(project_root(), port), env=ui_environment())
    except KeyboardInterrupt:
        code = 0
    sys.exit(code)


@main.group(cls=Group)
def latents() -> None:
    """The latent cache that training reads: look at it."""


@latents.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("data/encode"))
@click.option(
    "--items",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="Pictures to decode for the sheet; 0: none, then neither the base nor data/preprocess is needed.",
)
@click.option(
    "--sheet",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path(".darkroom/reconstruction.png"),
    show_default=True,
    help="Where the sheet is written: sources above, decoded latents below.",
)
@click.option("--keys", is_flag=True, help="List every item too: file, bucket, split, shard, key, captions.")
@plain_errors
def inspect(folder: Path, items: int, sheet: Path, keys: bool) -> None:
    """Check every file of the latent cache in FOLDER (data/encode) and say what it holds.

    Some latents are decoded again and set against the pictures that they were made of.
    """
    from stages.core.latents import LatentCache
    from stages.harness import latents_view

    cache = LatentCache(folder)
    click.echo(folder)
    for what, finding in latents_view.summary(cache):
        click.echo(f"{what:>12}  {finding}")
    for line in latents_view.files(cache):
        click.echo(line)
    if keys:
        for line in latents_view.keys(cache):
            click.echo(line)
    if items and cache.items:
        device = load_shared(read_params()).device
        check_device(device)
        found = latents_view.reconstruct(cache, Path(), device, items, sheet)
        for item, decibels in found:
            click.echo(f"{decibels:8.1f} dB  {latents_view.escaped(item.file_name)}")
        mean = sum(decibels for _, decibels in found) / len(found)
        click.echo(f"{mean:8.1f} dB  mean of {len(found)}; the pictures are in {sheet}")


@main.group(cls=Group)
def store() -> None:
    """The store of finished work: show it, prune it."""


@store.command()
@plain_errors
def show() -> None:
    """List what the store holds, by stage, the newest last; then the sizes of each stage and of all."""
    from stages.harness.store_view import entries, totals

    root = store_root()
    click.echo(f"{root}")
    found = entries(root)
    for entry in found:
        click.echo(
            f"{entry.stage:>12}  {entry.fingerprint[:12]}  {entry.bytes / 1e6:9.1f} MB  {entry.used:%Y-%m-%d %H:%M}"
        )
    for total in totals(found):
        click.echo(
            f"{total.name:>12}  {'together':<12}  {total.bytes / 1e6:9.1f} MB  {total.entries} entries"
        )


@store.command()
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Newest entries of each stage that stay.",
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@plain_errors
def prune(keep: int, yes: bool) -> None:
    """Remove old work (gc and prune are one command).

    Outs and DVC's cache are not touched; what is removed is computed again when needed.
    """
    from stages.harness.store_view import old_entries, remove

    old = old_entries(store_root(), keep)
    size, freed = sum(entry.bytes for entry in old) / 1e6, 0.0
    if not old:
        click.echo("nothing to remove")
        return
    if not yes:
        click.confirm(f"remove {len(old)} entries, {size:.1f} MB?", abort=True)
    removed = 0
    for entry in old:
        try:
            remove(entry)
        except LockedError as error:
            click.echo(f"kept: {error.message}")
            continue
        removed += 1
        freed += entry.bytes / 1e6
    click.echo(f"{removed} entries removed, {freed:.1f} MB freed")


store.add_command(prune, "gc")


if __name__ == "__main__":
    main()
