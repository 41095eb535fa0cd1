"""The base's record, and everything about a base that is refused; the hub is played by a server on this machine."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import BaseModelError
from stages.core.record import (
    COMPONENTS,
    HubSource,
    describe,
    locate,
    read_hub_source,
    read_record,
    safetensors_size,
    verified_folder,
)
from stages.core.store import sha256_bytes, sha256_file, write_json
from tests.tiny import make_tiny_base, make_tiny_xl, write_record

SOURCE = {"kind": "folder", "path": "base"}
UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_base(tmp_path_factory.mktemp("record") / "base")


@pytest.fixture
def base(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "base"))


# --- describing


def test_record_round_trip(base: Path, tmp_path: Path) -> None:
    record = describe(base, SOURCE)
    assert set(record.components) == set(COMPONENTS)
    assert record.files[UNET] == {"sha256": sha256_file(base / UNET), "bytes": (base / UNET).stat().st_size}
    assert "model_index.json" in record.files
    assert record.components["unet"]["class"] == "UNet2DConditionModel"
    assert record.components["vae"]["config"]["scaling_factor"] == 0.6
    write_json(tmp_path / "record.json", record.to_json())
    assert read_record(tmp_path / "record.json") == record
    assert describe(base, SOURCE) == record


def test_digests_are_of_the_component_that_changed(base: Path) -> None:
    before = describe(base, SOURCE)
    path = base / "unet" / "config.json"
    path.write_text(path.read_text() + "\n")
    after = describe(base, SOURCE)
    assert after.component_digest("unet") != before.component_digest("unet")
    assert after.component_digest("vae", "text_encoder") == before.component_digest("vae", "text_encoder")
    assert after.component_digest("unet", "vae") != before.component_digest("unet", "vae")
    assert after.digest != before.digest


@pytest.mark.parametrize("name", COMPONENTS)
def test_a_missing_component(base: Path, name: str) -> None:
    shutil.rmtree(base / name)
    with pytest.raises(
        BaseModelError, match=rf"base/{name} is missing or empty\n  remedy: a base needs unet, vae"
    ):
        describe(base, SOURCE)


def test_pickled_weights_are_named_and_never_enough(base: Path) -> None:
    (base / UNET).rename(base / "unet" / "diffusion_pytorch_model.bin")
    message = r"base/unet has no \.safetensors weights, only diffusion_pytorch_model\.bin\n  remedy: pickled weights can run"
    with pytest.raises(BaseModelError, match=message):
        describe(base, SOURCE)


def test_another_pipeline(base: Path) -> None:
    path = base / "model_index.json"
    path.write_text(path.read_text().replace('"StableDiffusionPipeline"', '"StableDiffusion3Pipeline"'))
    message = (
        r"model_index\.json says 'StableDiffusion3Pipeline'\n  remedy: this version reads folders of "
        "StableDiffusionPipeline and StableDiffusionXLPipeline"
    )
    with pytest.raises(BaseModelError, match=message):
        describe(base, SOURCE)


def test_one_text_encoder(base: Path) -> None:
    record = describe(base, SOURCE)
    assert record.text_components == ("text_encoder", "tokenizer")
    assert record.text_digest == record.component_digest("text_encoder", "tokenizer")
    assert record.vae_digest == record.component_digest("vae") != record.text_digest


def test_two_text_encoders(tmp_path: Path) -> None:
    folder = make_tiny_xl(tmp_path / "xl")
    record = describe(folder, SOURCE)
    assert record.text_components == ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    assert record.text_digest == record.component_digest(*record.text_components)
    assert record.components["text_encoder_2"]["class"] == "CLIPTextModelWithProjection"
    shutil.rmtree(folder / "tokenizer_2")
    with pytest.raises(
        BaseModelError, match=r"xl/tokenizer_2 is missing or empty\n  remedy: a base needs .*tokenizer_2"
    ):
        describe(folder, SOURCE)


def test_no_index_and_a_broken_one(base: Path) -> None:
    for text, message in (("{", "is not JSON"), ("[]", "is not a JSON object")):
        (base / "model_index.json").write_text(text)
        with pytest.raises(BaseModelError, match=message):
            describe(base, SOURCE)
    (base / "model_index.json").unlink()
    with pytest.raises(BaseModelError, match=r"model_index\.json is missing"):
        describe(base, SOURCE)


def test_no_configuration(base: Path) -> None:
    (base / "scheduler" / "scheduler_config.json").rename(base / "scheduler" / "other.json")
    with pytest.raises(BaseModelError, match=r"base/scheduler has no scheduler_config\.json"):
        describe(base, SOURCE)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1234\n"


@pytest.mark.parametrize("data", [LFS, b"", b"\x08\0\0\0\0\0\0\0notjson!", None])
def test_weights_that_are_not_whole(base: Path, data: bytes | None) -> None:
    whole = (base / UNET).read_bytes()
    assert safetensors_size(base / UNET) == len(whole)
    (base / UNET).write_bytes(whole[:-1] if data is None else data)
    with pytest.raises(
        BaseModelError, match=r"unet/.*\.safetensors is not a whole safetensors file .*\n.*git lfs pull"
    ):
        describe(base, SOURCE)


def test_a_missing_part_of_sharded_weights(base: Path) -> None:
    write_json(
        base / (UNET + ".index.json"), {"weight_map": {"a": "part-1.safetensors", "b": Path(UNET).name}}
    )
    with pytest.raises(BaseModelError, match=r"unet/part-1\.safetensors is missing, .*index\.json names it"):
        describe(base, SOURCE)


def test_record_missing_and_old(tmp_path: Path) -> None:
    with pytest.raises(BaseModelError, match=r"record\.json is missing\n  remedy: run `dvc repro base`"):
        read_record(tmp_path / "record.json")
    write_json(tmp_path / "record.json", {"source": {}})
    with pytest.raises(BaseModelError, match="has no field 'files'"):
        read_record(tmp_path / "record.json")


# --- checking against the record


def test_verified_folder(base: Path, tmp_path: Path) -> None:
    record = read_record(write_record(base, tmp_path))
    assert verified_folder(record, tmp_path, *COMPONENTS) == base
    data = bytearray((base / UNET).read_bytes())
    data[-1] ^= 1
    (base / UNET).write_bytes(data)
    assert verified_folder(record, tmp_path, "vae") == base  # not asked for
    with pytest.raises(
        BaseModelError, match=rf"{UNET} is not the file that data/base/record\.json describes"
    ):
        verified_folder(record, tmp_path, "vae", "unet")
    (base / UNET).unlink()
    with pytest.raises(BaseModelError, match=rf"{UNET} is missing"):
        verified_folder(record, tmp_path, "unet")


# --- the pointer to a hub repository


def pointer(root: Path, text: str, name: str = "base.yaml") -> Path:
    (root / name).write_text(text)
    return root / name


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_pointer(tmp_path: Path) -> None:
    path = pointer(tmp_path, f"repo: owner/na.me\nrevision: {COMMIT}\nvariant: fp16\n")
    assert read_hub_source(path) == HubSource(repo="owner/na.me", revision=COMMIT, variant="fp16")
    path = pointer(tmp_path, f"repo: owner/name\nrevision: {COMMIT}\nvariant: null\n")
    assert read_hub_source(path).variant is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "repo: a/b\nrevision: main\n",
            r"revision is 'main'\n  remedy: give the full commit hash \(40 hex digits\)",
        ),
        (f"repo: a/b\nrevision: {COMMIT[:12]}\n", "revision is '0123456789ab'"),
        (f"repo: a/b\nrevision: {COMMIT.upper()}\n", "revision is '0123456789ABCDEF"),
        (f"repo: a/b\nrevision: {'1' * 40}\n", "revision is 1{40}, not text\n  remedy: put it into quotes"),
        (f"repo: name\nrevision: {COMMIT}\n", "repo is 'name'\n  remedy: give it as owner/name"),
        (f"repo: https://hub/a/b\nrevision: {COMMIT}\n", "repo is 'https://hub/a/b'"),
        (f"repo: a/b\nrevison: {COMMIT}\n", r"unknown fields \['revison'\], missing fields \['revision'\]"),
        ("- a\n", "holds no fields"),
        ("a: [\n", "is not YAML"),
    ],
)
def test_pointer_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(BaseModelError, match=message):
        read_hub_source(pointer(tmp_path, text))


def test_locate(base: Path, tmp_path: Path) -> None:
    assert locate(base, download=False) == (base, {"kind": "folder", "path": base.as_posix()})
    with pytest.raises(BaseModelError, match=r"base\.source is .*nowhere, and there is nothing there"):
        locate(tmp_path / "nowhere", download=False)
    with pytest.raises(BaseModelError, match=r"model\.ckpt is neither a diffusers folder nor a \.yaml file"):
        locate(pointer(tmp_path, "x", "model.ckpt"), download=False)


# --- a hub on this machine, spoken to by the real client in a process of its own


class Hub:
    """Serves one repository at one commit, as much of the hub's HTTP as snapshot_download asks for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[str] = []
        self.fault: Callable[[Any], bool] = lambda handler: False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                self.do_GET(body=False)

            def do_GET(self, body: bool = True) -> None:
                hub.requests.append(f"{self.command} {self.path}")
                if not hub.fault(self):
                    hub.answer(self, body)

            def log_message(self, *_args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, handler: Any, body: bool) -> None:
        files = {
            path.relative_to(self.folder).as_posix(): path
            for path in self.folder.rglob("*")
            if path.is_file()
        }
        path = handler.path.split("?")[0]
        prefix = f"/owner/name/resolve/{COMMIT}/"
        if path == f"/api/models/owner/name/tree/{COMMIT}":
            value = [
                {"type": "file", "path": name, "oid": sha256_file(file)[:40], "size": file.stat().st_size}
                for name, file in sorted(files.items())
            ]
            send(handler, 200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body=body)
        elif path.startswith(prefix) and path.removeprefix(prefix) in files:
            data = files[path.removeprefix(prefix)].read_bytes()
            headers = {"ETag": f'"{sha256_bytes(data)}"', "X-Repo-Commit": COMMIT}
            send(handler, 200, data, headers, body=body)
        elif path.startswith("/api/models/owner/name/"):
            send(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound"}, body=body)
        else:
            send(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"}, body=body)


def send(handler: Any, status: int, data: bytes, headers: dict[str, str], *, body: bool) -> None:
    handler.send_response(status)
    for name, value in {**headers, "Content-Length": str(len(data))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if body:
        handler.wfile.write(data)


CLIENT = """
import sys
from pathlib import Path
from stages.core.errors import BaseModelError
from stages.core.record import BaseRecord, describe, locate, read_record, recorded_folder
from stages.core.store import write_json
source, action, record = Path(sys.argv[1]), sys.argv[2], Path("record.json")
try:
    if action == "recorded":
        print(recorded_folder(read_record(record), Path(), download=True))
    else:
        folder, description = locate(source, download=action == "download")
        write_json(record, describe(folder, description).to_json())
        print(folder)
except BaseModelError as error:
    print(error)
    sys.exit(1)
"""


@pytest.fixture
def hub(base: Path) -> Generator[Hub]:
    (base / "unet" / "diffusion_pytorch_model.bin").write_bytes(b"never fetched")
    hub = Hub(base)
    yield hub
    hub.server.shutdown()


def ask(root: Path, hub: Hub, action: str, *, revision: str = COMMIT, **extra: str) -> tuple[int, str]:
    source = pointer(root, f"repo: owner/name\nrevision: {revision}\n", "hub.yaml")
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(root / "hub-cache"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DOWNLOAD_TIMEOUT": "5",
        "PYTHONPATH": str(Path.cwd()),
        "NO_PROXY": "127.0.0.1",
        **extra,
    }
    command = [sys.executable, "-c", CLIENT, str(source), action]
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    return done.returncode, done.stdout or done.stderr


@pytest.mark.slow
def test_fetched_once_then_offline_then_completed(tmp_path: Path, hub: Hub, base: Path) -> None:
    code, output = ask(tmp_path, hub, "download")
    assert code == 0, output
    folder = Path(output.strip())
    assert sha256_file(folder / UNET) == sha256_file(base / UNET)
    assert not list(folder.rglob("*.bin"))
    assert not [request for request in hub.requests if ".bin" in request]
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["source"] == {"kind": "hub", "repo": "owner/name", "revision": COMMIT, "variant": None}
    assert record["digest"] == describe(base, SOURCE).digest

    hub.requests.clear()
    assert ask(tmp_path, hub, "look", HF_HUB_OFFLINE="1") == (0, output)
    assert ask(tmp_path, hub, "recorded") == (0, output)
    assert hub.requests == []
    # A fresh machine has the record alone: what it names is fetched.
    (folder / UNET).unlink()
    assert ask(tmp_path, hub, "recorded") == (0, output)
    assert sha256_file(folder / UNET) == sha256_file(base / UNET)
    shutil.rmtree(tmp_path / "hub-cache")
    assert ask(tmp_path, hub, "recorded") == (0, output)
    shutil.rmtree(tmp_path / "hub-cache")
    code, output = ask(tmp_path, hub, "look")
    assert (code, "is not in this machine's hub cache\n  remedy: run `dvc repro --force base`" in output) == (
        1,
        True,
    )


@pytest.mark.slow
def test_what_the_hub_refuses_is_named(tmp_path: Path, hub: Hub) -> None:
    def gated(handler: Any) -> bool:
        send(handler, 401, b"{}", {"X-Error-Code": "GatedRepo"}, body=handler.command == "GET")
        return True

    code, output = ask(tmp_path, hub, "download", revision=COMMIT[::-1])
    assert (code, output.splitlines()[0]) == (1, f"owner/name at {COMMIT[::-1]} is not on the hub")
    hub.fault = gated
    code, output = ask(tmp_path, hub, "download")
    assert (code, output.splitlines()[0]) == (1, "owner/name is gated")
    assert "accept its licence on the hub and set HF_TOKEN_PATH" in output


@pytest.mark.slow
def test_a_cut_connection_is_named_and_what_arrived_is_kept(tmp_path: Path, hub: Hub) -> None:
    def cut(handler: Any) -> bool:
        if "unet/diffusion" not in handler.path or handler.command != "GET":
            return False
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        handler.wfile.write(b"0" * 100)
        handler.close_connection = True
        handler.connection.close()
        return True

    hub.fault = cut
    code, output = ask(tmp_path, hub, "download")
    assert code == 1, output
    assert f"owner/name at {COMMIT} could not be fetched: " in output
    assert "check the network (HF_ENDPOINT names a mirror), then run the same command again" in output
    hub.fault = lambda handler: False
    hub.requests.clear()
    code, output = ask(tmp_path, hub, "download")
    assert code == 0, output
    assert not [request for request in hub.requests if request.startswith("GET") and "/vae/" in request]
