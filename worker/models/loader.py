"""Checkpoint files: checked against the model's tensors first, then read shard by shard.

Only safetensors is read. Pickle formats can run code on loading, so they are refused.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from protocol.errors import ModelError
from worker.models.config import CONFIG_FILE, GENERATION_FILE, read_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HEADER_LIMIT = 100 * 2**20
_READ_BYTES = 2**20


def verify_checkpoint(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Path]:
    """The file that holds each tensor, once every header agrees with `shapes`.

    Reads headers only, no weights. Raises ModelError with all tensors that are missing,
    unexpected, of another shape or not of a floating-point type, and for a directory without
    safetensors, a broken file, or an index that contradicts its shards.
    """
    if not directory.is_dir():
        raise ModelError(f"{directory}: not a directory")
    found: dict[str, Path] = {}
    problems: list[str] = []
    for path, names in _weight_files(directory).items():
        header = _read_header(path)
        if names is not None:
            problems += _disagreements(path.name, names, header.keys())
        for name, (shape, dtype) in header.items():
            found[name] = path
            if name not in shapes:
                problems.append(f"{name}: unexpected")
            elif shape != shapes[name]:
                problems.append(f"{name}: shape {list(shape)}, expected {list(shapes[name])}")
            if dtype not in _FLOAT_DTYPES:
                problems.append(f"{name}: dtype {dtype}, supported are {', '.join(_FLOAT_DTYPES)}")
    problems += [f"{name}: missing" for name in shapes if name not in found]
    if problems:
        raise ModelError(f"{directory}: the weights do not fit config.json: {'; '.join(problems)}")
    return found


def _weight_files(directory: Path) -> dict[Path, set[str] | None]:
    """Each weight file with the tensor names that the index gives it (None: no index)."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists():
        return {single: None}
    if index.exists():
        return _indexed_files(index)
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise ModelError(
            f"{directory}: only pickle weights ({', '.join(pickles[:3])}), which are never loaded; "
            "convert the checkpoint to safetensors"
        )
    raise ModelError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}")


def _indexed_files(index: Path) -> dict[Path, set[str] | None]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: no weight_map from tensor names to files")
    files: dict[Path, set[str] | None] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_shard_name(file):
            raise ModelError(
                f"{index}: {name} is in {file!r}; a shard is a plain *.safetensors file name "
                "in the same directory"
            )
        path = index.parent / file
        names = files.setdefault(path, set())
        if names is not None:
            names.add(name)
    if missing := sorted(path.name for path in files if not path.exists()):
        raise ModelError(f"{index.parent}: shards named in the index are missing: {missing}")
    return files


def _is_shard_name(file: str) -> bool:
    return file.endswith(".safetensors") and not any(c in file for c in "/\\\0")


def _disagreements(shard: str, indexed: set[str], held: Iterable[str]) -> list[str]:
    held = set(held)
    return [
        *(
            f"{name}: the index puts it in {shard}, which lacks it"
            for name in sorted(indexed - held)
        ),
        *(
            f"{name}: in {shard}, where the index has no such tensor"
            for name in sorted(held - indexed)
        ),
    ]


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor of a file, whose length is checked against its header.

    A safetensors file is the header's length (8 bytes, little-endian), the header (JSON, byte
    ranges counted from its end), then the data.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            if start > min(size, _HEADER_LIMIT):
                raise ValueError(f"a header of {start - 8} bytes in a file of {size}")
            header = json.loads(file.read(start - 8))
        header.pop("__metadata__", None)
        end = start + max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        if end != size:
            raise ValueError(f"{size} bytes, but the header describes {end}")
        return {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in header.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path}: broken safetensors file, fetch it again: {error}") from error


def read_weights(
    files: Mapping[str, Path], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Every tensor of `files` (from verify_checkpoint) in `dtype` on `device`.

    Goes shard by shard and copies each tensor out of the mapped file, so that replacing the file
    later cannot touch a model in use.
    """
    weights: dict[str, Tensor] = {}
    for path in sorted(set(files.values())):
        names = [name for name, holder in files.items() if holder == path]
        try:
            with safe_open(path, framework="pt") as file:
                for name in names:
                    tensor = file.get_tensor(name)
                    weights[name] = tensor.to(device=device, dtype=dtype, copy=True)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{path}: cannot be loaded: {error}") from error
    return weights


def fingerprint(directory: Path, files: Mapping[str, Path], dtype: torch.dtype) -> str:
    """SHA-256 (hex) over configuration and weight files and the serving dtype.

    Files count with name, size and content, in name order, and are streamed.
    """
    digest = hashlib.sha256(f"{dtype}\0".encode())
    configs = [directory / CONFIG_FILE, directory / GENERATION_FILE]
    paths = sorted({*files.values(), *(path for path in configs if path.exists())})
    for path in paths:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_READ_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
