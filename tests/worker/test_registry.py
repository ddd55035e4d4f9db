"""Names of models: the shipped one, directories, and ids of the hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from protocol.config import ModelSettings
from protocol.errors import ModelError
from tests.checkpoints import write_checkpoint
from tests.hub_server import HubServer
from worker.models.registry import EMBEDDED_DIRECTORY, load_model, resolve_model

ROOT = Path(__file__).resolve().parents[2]


def test_the_shipped_model_and_directories_resolve_without_a_network(tmp_path: Path) -> None:
    assert resolve_model(ModelSettings()) == EMBEDDED_DIRECTORY
    assert (EMBEDDED_DIRECTORY / "model.safetensors").is_file()
    assert resolve_model(ModelSettings(model=str(tmp_path))) == tmp_path.resolve()


@pytest.mark.parametrize("name", ["/no/such/model", "./absent", "../a/b", "a/b/c", "bad name"])
def test_what_is_neither_directory_nor_hub_id_is_refused_at_once(name: str) -> None:
    with pytest.raises(ModelError, match="no such directory, and no hub id either"):
        resolve_model(ModelSettings(model=name))


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path) / "model.safetensors"
    with pytest.raises(ModelError, match="not a directory"):
        resolve_model(ModelSettings(model=str(path)))


RESOLVE = """
import sys
from protocol.config import ModelSettings
from protocol.errors import ModelError
from worker.models.registry import resolve_model
try:
    print(resolve_model(ModelSettings(model=sys.argv[1])))
except ModelError as error:
    print("refused:", error)
"""


def resolve_elsewhere(name: str, home: Path, **environment: str) -> str:
    """What a fresh process prints: the hub client reads its settings when it is imported."""
    process = subprocess.run(
        [sys.executable, "-c", RESOLVE, name],
        cwd=ROOT,
        env=os.environ | {"HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return process.stdout.strip()


def test_a_hub_id_is_refused_clearly_when_there_is_no_network(tmp_path: Path) -> None:
    printed = resolve_elsewhere("someone/some-model", tmp_path, HF_HUB_OFFLINE="1")
    assert printed.startswith("refused: someone/some-model: no such directory, and it cannot be")
    assert "check the id, the network and the access rights" in printed


def test_of_a_hub_model_only_safetensors_and_json_are_fetched(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / "modeling_ouro.py").write_text("raise SystemExit")
    with HubServer("someone/some-model", source) as hub:
        printed = resolve_elsewhere("someone/some-model", tmp_path / "home", HF_ENDPOINT=hub.url)
        unknown = resolve_elsewhere("someone/other", tmp_path / "home", HF_ENDPOINT=hub.url)
    directory = Path(printed)
    assert {path.name for path in directory.iterdir()} == {"config.json", "model.safetensors"}
    loaded = load_model(directory, torch.float32, torch.device("cpu"), "some-model")
    original = load_model(source, torch.float32, torch.device("cpu"), "some-model")
    assert loaded.profile == original.profile
    assert unknown.startswith("refused: someone/other:")
