"""Which attention a worker takes, which it refuses, and what that costs a machine without CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from protocol.config import CacheSettings, WorkerSettings
from protocol.errors import ConfigError
from tests.checkpoints import config_values, random_tensors
from worker.attention.choice import choose_attention
from worker.graphs import ROW_BUCKETS, TOKEN_BUCKETS, buckets_up_to, most_rows
from worker.models.config import OuroConfig
from worker.models.loop_kernels import loop_kernels
from worker.models.ouro import OuroModel
from worker.models.torch_loop import TorchLoopKernels
from worker.worker import Worker

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model() -> OuroModel:
    values = config_values()
    return OuroModel(OuroConfig.model_validate(values), random_tensors(values), "small", "0")


@pytest.mark.parametrize(
    ("name", "taken"), [("auto", "numba"), ("numba", "numba"), ("torch", "torch")]
)
def test_what_a_cpu_takes_is_told(
    name: str, taken: str, model: OuroModel, caplog: pytest.LogCaptureFixture
) -> None:
    settings = WorkerSettings.model_validate({"attention": name})
    with caplog.at_level("INFO"):
        backend = choose_attention(settings.attention, model, 8, CPU)
    assert backend.name == taken
    assert f"attention {name}: {taken}" in caplog.text


def test_a_cpu_takes_torch_where_numba_cannot_serve(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, model: OuroModel
) -> None:
    values = config_values()
    tensors = {name: value.bfloat16() for name, value in random_tensors(values).items()}
    narrow = OuroModel(OuroConfig.model_validate(values), tensors, "narrow", "0")
    with caplog.at_level("INFO"):
        assert choose_attention("auto", narrow, 8, CPU).name == "torch"
    assert "Numba's kernels take float32, the model is bfloat16" in caplog.text
    with pytest.raises(ConfigError, match=r'attention "numba": .*bfloat16; use "auto" or "torch"'):
        choose_attention("numba", narrow, 8, CPU)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level("INFO"):
        assert choose_attention("auto", model, 8, CPU).name == "torch"
    assert "the package numba is not installed" in caplog.text
    assert type(loop_kernels(CPU, torch.float32)) is TorchLoopKernels


def test_an_explicit_choice_that_cannot_be_had_is_refused(model: OuroModel) -> None:
    with pytest.raises(ConfigError, match=r'attention "triton": .*the device is cpu; use "auto"'):
        choose_attention("triton", model, 8, CPU)
    settings = WorkerSettings(
        device="cpu", attention="triton", cache=CacheSettings(num_blocks=64), num_slots=2
    )
    with pytest.raises(ConfigError, match="Triton runs on CUDA"):
        Worker.open(settings)


def test_an_unknown_attention_is_no_setting() -> None:
    with pytest.raises(ValidationError, match="attention"):
        WorkerSettings.model_validate({"attention": "flash"})


def test_the_torch_backend_says_what_it_can_do(model: OuroModel) -> None:
    abilities = choose_attention("torch", model, 8, CPU).abilities
    assert abilities.float32
    assert not abilities.device_metadata
    assert not abilities.packed_prefill


def test_a_worker_without_cuda_has_no_graphs_and_imports_no_kernel() -> None:
    program = (
        "import sys; from worker.local_executor import LocalExecutor;"
        "from protocol.config import CacheSettings, WorkerSettings;"
        "settings = WorkerSettings(device='cpu', cache=CacheSettings(num_blocks=64), num_slots=2);"
        "LocalExecutor.open(settings).shutdown(30.0);"
        "found = [name for name in sys.modules if name.startswith(('triton', 'worker.kernels'))];"
        "sys.exit(str(found) if found else 0)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_buckets_reach_as_far_as_batches_do() -> None:
    assert buckets_up_to(ROW_BUCKETS, 1) == (1,)
    assert buckets_up_to(ROW_BUCKETS, 32) == (1, 2, 4, 8, 16, 24, 32)
    assert buckets_up_to(ROW_BUCKETS, 40)[-2:] == (32, 48)
    assert buckets_up_to(ROW_BUCKETS, 1000) == ROW_BUCKETS
    assert buckets_up_to(TOKEN_BUCKETS, 512)[-1] == 512
    assert (most_rows(40), most_rows(256), most_rows(300)) == (48, 256, 300)
