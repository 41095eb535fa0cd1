"""Nothing of the caller's own store, records, DVC or hub leaks into a unit test, or out of it."""

import os

import pytest

# Before torch is loaded: its threads wait for each other by spinning, which on a busy machine takes minutes.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("DARKROOM_", "DVC_", "MLFLOW_", "HF_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("DARKROOM_TRACKING", "off")
