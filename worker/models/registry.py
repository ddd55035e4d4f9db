"""Which model a setting means, and which class serves it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.config import DEFAULT_MODEL
from protocol.errors import ModelError
from worker.models import loader
from worker.models.config import CONFIG_FILE, read_config, read_json
from worker.models.ouro import OuroModel, tensor_shapes

if TYPE_CHECKING:
    import torch

    from protocol.config import ModelSettings
    from worker.models.base import LoopedModel
    from worker.models.loop_kernels import LoopKernels

EMBEDDED_DIRECTORY = Path(__file__).resolve().parent / DEFAULT_MODEL
"""The checkpoint that is shipped with the package."""

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_HUB_PATTERNS = ("*.safetensors", "*.json")


def resolve_model(settings: ModelSettings) -> Path:
    """The local directory of the model that `settings.model` names.

    In this order: "ouro-tiny" is the shipped one, an existing directory is taken as it is, and
    anything else is a hub id, of which only safetensors and JSON files are fetched (at
    `revision`, which the first two ignore). Raises ModelError when it cannot be had.
    """
    name = settings.model
    if name == DEFAULT_MODEL:
        return EMBEDDED_DIRECTORY
    if (directory := Path(name).expanduser()).exists():
        if not directory.is_dir():
            raise ModelError(f"{directory}: not a directory; a model is the directory around it")
        return directory.resolve()
    if not _HUB_ID.fullmatch(name) or name.startswith("."):
        raise ModelError(
            f"{name}: no such directory, and no hub id either; give {DEFAULT_MODEL!r}, "
            "a directory or owner/name"
        )
    return _download(name, settings.revision)


def _download(hub_id: str, revision: str | None) -> Path:
    # Imported late: only a hub id needs it, and it is slow to import.
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(hub_id, revision=revision, allow_patterns=list(_HUB_PATTERNS))
        )
    except Exception as error:  # the client raises what its HTTP library does: all mean "not had"
        raise ModelError(
            f"{hub_id}: no such directory, and it cannot be fetched from the hub "
            f"({type(error).__name__}: {error}); check the id, the network and the access rights"
        ) from error


def load_model(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    name: str,
    kernels: LoopKernels | None = None,
) -> LoopedModel:
    """The model in `directory`, in `dtype` on `device`, served as `name`.

    `kernels` None takes the fastest for the device.
    Names, shapes and types of all tensors are checked before any weight is read. Raises
    ModelError when the directory holds no model that can be served.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: not a directory")
    model_type = read_json(directory / CONFIG_FILE).get("model_type")
    if model_type != "ouro":
        raise ModelError(
            f"{directory / CONFIG_FILE}: model_type is {model_type!r}, supported is 'ouro'"
        )
    config = read_config(directory)
    files = loader.verify_checkpoint(directory, tensor_shapes(config))
    fingerprint = loader.fingerprint(directory, files, dtype)
    weights = loader.read_weights(files, dtype, device)
    return OuroModel(config, weights, name, fingerprint, kernels)
