"""What is chosen where the user left it open: devices, batch sizes, the context."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motley import LLM
from motley.backends import get_backend
from motley.errors import DeviceError
from motley.gguf import read_spec
from motley.kvcache.types import get_cache_type
from motley.models import read_params
from motley.runtime import CacheConfig, defaults, make_crew, split_model
from motley.runtime.defaults import ContextChoice, batch_sizes, choose_context, choose_devices
from random_models import GEMMA3, LLAMA

GIB = 2**30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """GPUs of this machine, with their free memory."""
    free: dict[str, int] = {}
    monkeypatch.setattr(defaults, "known_devices", lambda: ("cpu", *free))
    monkeypatch.setattr(defaults, "_free_bytes", lambda name: free[name])
    return free


def test_without_a_gpu_the_cpu_is_chosen_and_said(gpus: dict[str, int]) -> None:
    choice = choose_devices("auto", None, None)
    assert choice.devices == "cpu"
    assert choice.notice == "devices: cpu (--device chooses others)"


def test_one_gpu_is_chosen_alone(gpus: dict[str, int]) -> None:
    pytest.importorskip("triton")
    gpus["cuda:0"] = 12 * GIB
    choice = choose_devices("auto", None, None)
    assert (choice.devices, choice.split_mode, choice.tensor_split) == (["cuda:0"], None, None)
    assert choice.notice == "devices: cuda:0 (12.0 GiB free) (--device chooses others)"


def test_several_gpus_share_by_their_free_memory(gpus: dict[str, int]) -> None:
    pytest.importorskip("triton")
    gpus |= {"cuda:0": 24 * GIB, "cuda:1": 8 * GIB}
    choice = choose_devices("auto", None, None)
    assert choice.devices == ["cuda:0", "cuda:1"]
    assert choice.split_mode == "tensor"
    assert list(choice.tensor_split or ()) == [24 * GIB, 8 * GIB]
    assert choice.notice is not None
    assert "--split-mode" in choice.notice
    own = choose_devices("auto", "layer", (1, 1))
    assert (own.split_mode, own.tensor_split) == ("layer", (1, 1))


def test_what_was_named_is_left_alone(gpus: dict[str, int]) -> None:
    gpus["cuda:0"] = GIB
    assert choose_devices("cpu,cpu", "tensor", (3, 1)).notice is None
    assert choose_devices("auto", None, None, backend="reference").devices == "cpu"


@pytest.mark.parametrize(
    ("free", "chosen", "said"),
    [
        (
            [0, 8, 0],
            ["cuda:1"],
            "cuda:1 (8.0 GiB free), not cuda:0 (0 B free) and cuda:2 (0 B free) (--device",
        ),
        ([24, 0, 8], ["cuda:0", "cuda:2"], "cuda:2 (8.0 GiB free), not cuda:1 (0 B free), split by tensor"),
        ([0, 0], ["cuda:0", "cuda:1"], "cuda:0 (0 B free), cuda:1 (0 B free), split by tensor"),
    ],
)
def test_gpus_without_room_are_left_out_if_another_one_has_room(
    gpus: dict[str, int], free: list[int], chosen: list[str], said: str
) -> None:
    pytest.importorskip("triton")
    gpus |= {f"cuda:{i}": n * GIB for i, n in enumerate(free)}
    choice = choose_devices("auto", None, None)
    assert choice.devices == chosen
    assert said in (choice.notice or "")
    assert choice.tensor_split != [0.0, 0.0]  # no proportions: the memory that is missing is said later
    of_all = choose_devices("auto", None, None, leaves_out=False)
    assert list(of_all.devices) == list(choose_devices("auto", "layer", (1,) * len(free)).devices) == [*gpus]


def test_a_gpu_that_fails_is_left_out_with_the_reason(
    gpus: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")

    def free_bytes(name: str) -> int:
        if gpus[name] == 0:
            raise RuntimeError("CUDA error: devices are busy\nFor debugging …")
        return gpus[name]

    monkeypatch.setattr(defaults, "_free_bytes", free_bytes)
    gpus |= {"cuda:0": 0, "cuda:1": GIB}
    choice = choose_devices("auto", None, None)
    assert choice.devices == ["cuda:1"]
    assert "not cuda:0 (CUDA error: devices are busy) (--device" in (choice.notice or "")
    gpus["cuda:1"] = 0
    with pytest.raises(DeviceError, match="cuda:0 cannot be used: CUDA error: devices are busy"):
        choose_devices("auto", None, None)


def test_the_notice_says_how_gpus_are_used(gpus: dict[str, int]) -> None:
    pytest.importorskip("triton")
    gpus |= {"cuda:0": 24 * GIB, "cuda:1": 8 * GIB}
    assert "split by layer (" in (choose_devices("auto", "layer", None).notice or "")
    alone = choose_devices("auto", "none", None)
    assert alone.notice == "devices: cuda:0 (24.0 GiB free) (--device chooses others)"


@pytest.mark.parametrize("devices", [None, 5, b"cpu", 0.5])
def test_devices_of_odd_types_are_refused(devices: Any) -> None:
    with pytest.raises(DeviceError, match="it must be text"):
        LLM(devices=devices)


def test_a_gpu_without_triton_is_not_used_and_the_reason_is_said(
    gpus: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus["cuda:0"] = GIB
    monkeypatch.setattr(defaults.importlib.util, "find_spec", lambda _: None)
    choice = choose_devices("auto", None, None)
    assert choice.devices == "cpu"
    assert "needs Triton" in (choice.notice or "")


@pytest.mark.parametrize(
    ("asked", "devices", "expected"),
    [
        ((None, None), ["cuda:0"], (2048, 128)),
        ((None, None), ["cuda:0", "cuda:1"], (2048, 128)),
        ((None, None), ["cpu"], (512, 8)),
        ((None, None), ["cuda:0", "cpu"], (512, 8)),
        ((64, 3), ["cuda:0"], (64, 3)),
    ],
)
def test_batches_suit_the_devices(
    asked: tuple[Any, Any], devices: list[str], expected: tuple[int, int]
) -> None:
    assert batch_sizes(*asked, devices) == expected


def test_smaller_steps_are_chosen_where_the_usual_ones_do_not_fit(path: Path) -> None:
    """The model takes 4.2 MiB, a step of 512 tokens 3 MiB, one of 128 tokens 0.75 MiB."""
    with LLM(path, devices="cpu", device_memory="6MiB") as llm:
        assert (llm.engine.scheduler.n_batch, llm.engine.scheduler.n_parallel) == (128, 8)
        said = (
            "at most 8 requests run at a time and a step has at most 128 tokens: there is no memory for more"
        )
        assert f"{said} (-np and -b ask for numbers)" in llm.notices
    with LLM(path, devices="cpu", device_memory="6MiB", n_parallel=2) as llm:
        assert (llm.engine.scheduler.n_batch, llm.engine.scheduler.n_parallel) == (128, 2)
        assert (
            "a step has at most 128 tokens: there is no memory for more (-b asks for a number)" in llm.notices
        )
    with LLM(path, devices="cpu", device_memory="12MiB") as llm:
        assert (llm.engine.scheduler.n_batch, llm.engine.scheduler.n_parallel) == (512, 8)
    with pytest.raises(DeviceError, match="are missing"):
        LLM(path, devices="cpu", device_memory="6MiB", n_batch=512)
    with pytest.raises(DeviceError, match=r"needs 4\.2 MiB for weights and 768\.0 KiB for activations"):
        LLM(path, devices="cpu", device_memory="4MiB")


# --- the context ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LLAMA.write(tmp_path_factory.mktemp("model") / "llama.gguf")


def context(
    path: Path,
    n_ctx: int | None,
    kind: str = "f16",
    n_parallel: int = 2,
    devices: str = "cpu",
    **limits: Any,
) -> ContextChoice:
    spec, crew = read_spec(path), make_crew(devices)
    params, config = read_params(spec), CacheConfig(get_cache_type(kind), get_cache_type(kind), **limits)
    return choose_context(
        n_ctx,
        lambda n: split_model(spec, params, crew, config, n_ctx=n, rotate=True),
        params,
        [get_backend("auto")] * len(crew),
        config,
        n_batch=32,
        n_parallel=n_parallel,
    )


def tokens_held(choice: ContextChoice) -> int:
    return choice.fit.plan.groups[0].n_blocks * choice.fit.plan.config.block_size


def bytes_of(choice: ContextChoice) -> int:
    return choice.fit.plan.n_bytes(0)


def test_the_context_is_what_the_model_was_trained_for(path: Path) -> None:
    choice = context(path, None)
    assert choice.n_ctx == choice.split.options.n_ctx == 2048
    assert tokens_held(choice) == 2 * 2048
    assert choice.notice is None


def test_a_context_that_was_asked_for_is_taken(path: Path) -> None:
    choice = context(path, 100)
    assert choice.n_ctx == choice.split.options.n_ctx == 100
    assert tokens_held(choice) == 2 * 128


def test_it_is_cut_to_what_fits_and_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = bytes_of(context(path, 512, n_parallel=1))
    monkeypatch.setattr(defaults, "host_bytes", lambda: 16 * one)
    choice = context(path, None)
    assert choice.n_ctx == choice.split.options.n_ctx == 512
    assert tokens_held(choice) == 512
    assert bytes_of(choice) <= one
    assert choice.notice is not None
    assert "the context is 512 tokens: the model's 2048 do not fit" in choice.notice
    assert "-ctk q8_0" in choice.notice
    smaller = context(path, None, "q8_0")
    assert 512 < smaller.n_ctx < 2048
    assert f"it would be {smaller.n_ctx}" in choice.notice


def test_the_memory_of_workers_is_taken_to_be_that_of_this_machine(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bytes_of(context(path, 512, n_parallel=1))
    monkeypatch.setattr(defaults, "host_bytes", lambda: 16 * one)
    assert context(path, None, devices="cpu@a").n_ctx == 512
    assert context(path, None, devices="cpu@a,cpu@a").n_ctx == 512
    assert context(path, None, devices="cpu@a,cpu@b").n_ctx == 1024


def test_limits_of_the_cache_cut_the_context(path: Path) -> None:
    choice = context(path, None, max_tokens=640)
    assert choice.n_ctx == 640
    assert tokens_held(choice) == 640


def test_no_cache_type_is_named_where_the_tokens_themselves_are_limited(path: Path) -> None:
    assert "-ctk" not in (context(path, None, max_tokens=640).notice or "-ctk")
    by_bytes = context(path, None, max_bytes=bytes_of(context(path, 512, n_parallel=1)))
    assert "-ctk q8_0" in (by_bytes.notice or "")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return GEMMA3.write(tmp_path_factory.mktemp("windowed") / "gemma3.gguf")


def test_layers_with_windows_do_not_cut_the_context(windowed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer of six holds the whole context, the others windows of 32 tokens."""
    whole = context(windowed, None)
    assert whole.n_ctx == 2048
    monkeypatch.setattr(defaults, "host_bytes", lambda: 16 * bytes_of(whole))
    assert context(windowed, None).fit == whole.fit
    cut = context(windowed, None, kind="f32")
    assert bytes_of(whole) * 3 / 4 < bytes_of(cut) <= bytes_of(whole)
    assert f"-ctv q8_0 it would be {whole.n_ctx}" in (cut.notice or "")


@pytest.mark.parametrize("n_parallel", [1, 3])
def test_a_model_of_windows_alone_has_its_whole_context(tmp_path: Path, n_parallel: int) -> None:
    keys = GEMMA3.keys | {"attention.sliding_window_pattern": GEMMA3.n_layers + 1}
    path = replace(GEMMA3, keys=keys).write(tmp_path / "windows.gguf")
    choice = context(path, None, n_parallel=n_parallel)
    assert (choice.n_ctx, choice.notice) == (2048, None)
    assert [group.window for group in choice.fit.plan.groups] == [32]
    assert (
        tokens_held(choice) == n_parallel * 96
    )  # a window, a batch, and a block where they begin within one


def test_an_llm_with_defaults_says_what_it_chose(path: Path) -> None:
    with LLM(path) as llm:
        assert llm.n_ctx == 2048
        assert llm.chosen_devices is None or llm.chosen_devices.startswith("devices: ")
        assert llm.warm_up is not None
    with LLM(path, devices="cpu", n_ctx=64) as llm:
        assert llm.chosen_devices is None
