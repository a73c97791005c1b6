"""Crews of several processes answer bit for bit as the crew of one process."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from worker_process import WorkerProcess, worker_processes

from motley import LLM
from motley.backends import SharedGroup
from motley.bundled import bundled_draft_path, bundled_experts_path
from motley.engine.drafting.control import FixedControl
from motley.errors import ConfigError, DeviceError
from motley.runtime import group, make_crew
from motley.runtime.hosts import mesh
from motley.runtime.hosts.serving import WorkerServer
from motley.runtime.hosts.wire import decode, encode

TOKENS: list[int] = np.random.default_rng(3).integers(1, 250, 70).tolist()
OPTIONS: dict[str, Any] = {"n_ctx": 128, "n_parallel": 2, "n_batch": 48, "kv_block_size": 16}


@pytest.fixture(scope="module")
def workers() -> Iterator[list[WorkerProcess]]:
    with worker_processes(2) as found:
        yield found


def devices(names: str, workers: list[WorkerProcess]) -> str:
    """`cpu,cpu@a,cpu@b` with the addresses of workers instead of a and b; without workers: in one process."""
    for letter, worker in zip("ab", workers, strict=False):
        names = names.replace(f"@{letter}", f"@{worker.address}")
    return names if workers else names.replace("@a", "").replace("@b", "")


def answers(llm: LLM) -> tuple[npt.NDArray[np.float32], list[tuple[int, ...]]]:
    """Logits of a text; greedy answers of requests that run together."""
    prompts = [TOKENS[:40], TOKENS[:20], TOKENS[5:60]]
    done = llm.generate(prompts, max_tokens=12, temperature=0, ignore_eos=True)
    return llm.logits(TOKENS), [each.tokens for each in done]


@pytest.mark.parametrize(
    ("names", "mode", "shares"),
    [
        pytest.param("cpu,cpu@a", "tensor", (1, 1), marks=pytest.mark.slow),
        ("cpu,cpu@a", "tensor", (3, 1)),
        ("cpu,cpu@a", "layer", (1, 1)),
        pytest.param("cpu,cpu@a", "layer", (3, 1), marks=pytest.mark.slow),
        ("cpu,cpu@a", "tensor", (0, 1)),
        pytest.param("cpu,cpu@a", "tensor", (1, 0), marks=pytest.mark.slow),
        pytest.param("cpu,cpu@a", "layer", (0, 1), marks=pytest.mark.slow),
        pytest.param("cpu,cpu@a,cpu@b", "tensor", (2, 1, 1), marks=pytest.mark.slow),
        pytest.param("cpu,cpu@a,cpu@b", "layer", (1, 1, 2), marks=pytest.mark.slow),
        ("cpu,cpu@a,cpu@b", "tensor", (1, 0, 1)),
        ("cpu,cpu@a,cpu,cpu@a", "tensor", (1, 1, 1, 1)),  # two devices in each process, and mixed
        pytest.param("cpu,cpu@a,cpu,cpu@a", "layer", (1, 1, 1, 1), marks=pytest.mark.slow),
        ("(cpu,cpu),(cpu)@a", None, (3, 1, 2)),  # groups: layers between, tensors within
        ("cpu,(cpu,cpu)@a,(cpu,cpu)@b", None, (1, 1, 1, 3, 1)),
        pytest.param("(cpu,cpu),(cpu)@a", None, (0, 0, 1), marks=pytest.mark.slow),
        pytest.param("cpu,(cpu,cpu)@a,cpu@a,(cpu,cpu)", None, (1, 0, 1, 1, 1, 1), marks=pytest.mark.slow),
        ("(cpu,cpu)@a,(cpu)@b", None, (3, 1, 2)),  # rank 0 has no device of the model
        pytest.param("cpu@a,cpu@b", "tensor", (1, 3), marks=pytest.mark.slow),
        pytest.param("cpu@a,cpu@b", None, (2, 1), marks=pytest.mark.slow),
        pytest.param("(cpu,cpu)@a", None, (3, 1), marks=pytest.mark.slow),
        pytest.param("cpu@a", None, (1,), marks=pytest.mark.slow),
        ("cpu@a,cpu,cpu@b,cpu", "tensor", (1, 1, 1, 1)),  # rank 0's first device is not the crew's
        pytest.param("(cpu,cpu)@a,cpu", None, (1, 1, 1), marks=pytest.mark.slow),
    ],
)
def test_logits_and_texts_are_those_of_one_process(
    names: str, mode: str | None, shares: tuple[int, ...], random_llama: Path, workers: list[WorkerProcess]
) -> None:
    options = OPTIONS | {"split_mode": mode, "tensor_split": shares}
    alone = {"devices": devices(names, [])}
    if mode == "tensor" and names == "cpu@a,cpu@b":  # rank 0 has the residual, but no weights
        alone |= {"devices": "cpu,cpu,cpu", "tensor_split": (0, *shares)}
    with LLM(random_llama, **(options | alone)) as llm:
        expected = answers(llm)
    with LLM(random_llama, devices=devices(names, workers), n_threads=1, **options) as llm:
        found = answers(llm)
        llm._call(llm._loaded.cache.check_integrity)
    assert np.array_equal(found[0], expected[0])
    assert found[1] == expected[1]


@pytest.mark.parametrize(
    ("names", "mode"),
    [
        ("cpu,cpu@a,cpu@b", "tensor"),
        pytest.param("cpu,cpu@a,cpu@b", "layer", marks=pytest.mark.slow),
        ("(cpu,cpu),(cpu,cpu)@a,cpu@b", None),
        ("(cpu,cpu)@a,(cpu)@b", None),
        pytest.param("cpu@a,cpu,cpu@b", "tensor", marks=pytest.mark.slow),
    ],
)
def test_the_same_without_shared_memory(
    names: str,
    mode: str | None,
    random_llama: Path,
    workers: list[WorkerProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Collectives over direct lines, as between machines; then over Gloo alone."""
    found = []
    for shared_memory, direct_lines in (("1", "1"), ("0", "1"), ("0", "0")):
        monkeypatch.setenv("MOTLEY_SHARED_MEMORY", shared_memory)
        monkeypatch.setenv("MOTLEY_DIRECT_LINES", direct_lines)
        with LLM(random_llama, devices=devices(names, workers), split_mode=mode, **OPTIONS) as llm:
            hosts = llm._loaded.runner._hosts
            assert hosts is not None
            is_shared = hosts.link.mesh._shared is not None
            assert is_shared == (shared_memory == "1" and SharedGroup.n_bytes(5) > 0)
            assert (hosts.link.mesh._lines is not None) == (not is_shared and direct_lines == "1")
            found.append(answers(llm))
    for logits, texts in found[1:]:
        assert np.array_equal(logits, found[0][0])
        assert texts == found[0][1]


@pytest.mark.parametrize("n_bytes", [64, 0])  # of the longest message of a direct line; 0: none is empty
def test_long_messages_and_short_ones_alternate(
    n_bytes: int, random_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over Gloo and direct lines, also where the rows of logits take another way than in the step before."""
    kinds: list[dict[str, Any]] = [{"temperature": 0}, {"top_k": 0, "seed": 1}, {"temperature": 0}]

    def texts(llm: LLM) -> list[tuple[int, ...]]:
        return [llm.generate(TOKENS[:20], max_tokens=6, ignore_eos=True, **kind).tokens for kind in kinds]

    options = OPTIONS | {"split_mode": "tensor", "spec": "off", "prefix_cache": False}
    with LLM(random_llama, devices="cpu,cpu", **options) as llm:
        expected = texts(llm)
    monkeypatch.setenv("MOTLEY_SHARED_MEMORY", "0")
    monkeypatch.setattr(mesh, "MAX_BYTES", n_bytes)
    monkeypatch.setattr(mesh, "_MAX_POSTED", 4096)  # a part of a step's receives
    server = WorkerServer(cache=tmp_path, n_threads=1)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        with LLM(random_llama, devices=f"cpu,cpu@{server.address}", n_threads=1, **options) as llm:
            assert texts(llm) == expected
            hosts = llm._loaded.runner._hosts
            assert hosts is not None
            assert hosts.n_connections == 1  # no step has failed
    finally:
        server.close()
        thread.join(120)


@pytest.mark.parametrize(("wire", "tolerance"), [("f16", 2e-2), ("q8", 0.5)])
def test_all_processes_add_up_what_the_wire_holds(
    wire: str,
    tolerance: float,
    random_llama: Path,
    workers: list[WorkerProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bits as a crew of one process whose devices round all addends."""
    options = OPTIONS | {"split_mode": "tensor", "tensor_split": (1, 1, 1, 1), "backend": "reference"}
    names, tokens = "cpu,cpu@a,cpu,cpu@a", TOKENS[:20]
    with LLM(random_llama, devices=devices(names, workers), wire=wire, **options) as llm:
        found = llm.logits(tokens)
    sum_into = group._sum_into

    def sum_rounded(out: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        coded = [decode(wire, encode(wire, part.flatten()), part.numel()).view(part.shape) for part in parts]
        sum_into(out, coded)

    with LLM(random_llama, devices=devices(names, []), **options) as llm:
        exact = llm.logits(tokens)
        monkeypatch.setattr(group, "_sum_into", sum_rounded)
        rounded = llm.logits(tokens)
    assert np.array_equal(found, rounded)
    assert 0 < np.abs(found - exact).max() < tolerance * np.abs(exact).max()


@pytest.mark.parametrize(
    ("names", "mode"),
    [
        ("cpu,cpu@a", "tensor"),
        pytest.param("cpu,cpu@a", "layer", marks=pytest.mark.slow),
        ("cpu,(cpu,cpu)@a", None),
    ],
)
def test_windows_and_quantized_caches(
    names: str, mode: str | None, random_gemma3: Path, workers: list[WorkerProcess]
) -> None:
    options = OPTIONS | {"split_mode": mode, "cache_type_k": "q8_0", "cache_type_v": "q4_0"}
    found = []
    for crew in ([], workers):
        with LLM(random_gemma3, devices=devices(names, crew), **options) as llm:
            found.append(answers(llm))
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(
    ("architecture", "names", "mode"),
    [
        ("qwen3moe", "cpu,cpu@a", "tensor"),
        pytest.param("gpt-oss", "cpu,cpu@a", "tensor", marks=pytest.mark.slow),
        ("qwen3moe", "cpu,(cpu,cpu)@a", None),
    ],
)
def test_experts(
    architecture: str, names: str, mode: str | None, shared: Path, workers: list[WorkerProcess]
) -> None:
    path = shared / "golden" / architecture / "model.gguf"
    tokens = np.load(path.parent / "tokens.npy")[:24].tolist()
    found = []
    for crew in ([], workers):
        with LLM(path, devices=devices(names, crew), n_ctx=64, split_mode=mode) as llm:
            done = [llm.generate(tokens, max_tokens=6, temperature=0, n_expert_used=n) for n in (None, 1)]
            found.append((llm.logits(tokens), [each.tokens for each in done]))
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("shares", [None, (1, 3)])
def test_experts_on_another_host(shares: tuple[int, ...] | None, workers: list[WorkerProcess]) -> None:
    """Attention and cache are here, routed experts there, or a part of them."""
    found = []
    for crew in ([], workers):
        names = devices("cpu,cpu@a", crew)
        with LLM(bundled_experts_path(), devices=names, n_cpu_moe=4, expert_split=shares, **OPTIONS) as llm:
            found.append(answers(llm))
            assert [m["kv_cache"] > 0 for m in llm.device_memory().values()] == [True, False]
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize(
    ("names", "mode"), [("cpu,cpu@a", "tensor"), ("cpu,cpu@a", "layer"), ("cpu,(cpu,cpu)@a", None)]
)
def test_recurrent_states(
    names: str, mode: str | None, shared: Path, workers: list[WorkerProcess], tmp_path: Path
) -> None:
    path = shared / "golden" / "qwen3next" / "model.gguf"
    tokens = np.load(path.parent / "golden.npz")["tokens"].tolist()[:40]
    found = []
    for crew in ([], workers):
        with LLM(path, devices=devices(names, crew), split_mode=mode, **OPTIONS) as llm:
            done = llm.generate([tokens, tokens[:17]], max_tokens=8, temperature=0, ignore_eos=True)
            llm.save_session(tmp_path / f"{bool(crew)}", tokens)
            found.append((llm.logits(tokens), [each.tokens for each in done]))
    assert np.array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]
    assert (tmp_path / "True").read_bytes() == (tmp_path / "False").read_bytes()
    with LLM(path, devices=devices(names, workers), split_mode=mode, **OPTIONS) as llm:
        assert llm.load_session(tmp_path / "False") == tokens
        assert llm.generate(tokens, max_tokens=8, temperature=0, ignore_eos=True).tokens == found[0][1][0]


@pytest.mark.parametrize("spec", ["lookup", "lookahead", pytest.param("exit", marks=pytest.mark.slow)])
def test_speculation(spec: str, bundled: Path, workers: list[WorkerProcess]) -> None:
    options = OPTIONS | {"spec": spec, "draft_layers": 2 if spec == "exit" else None, "split_mode": "tensor"}
    prompts = ["Once upon a time there was a fox. The fox", "One two one two one two one"]
    found = []
    for crew in ([], workers):
        with LLM(bundled, devices=devices("cpu,cpu@a", crew), **options) as llm:
            speculator = llm._loaded.engine.speculator
            assert speculator is not None
            speculator._control = FixedControl()  # drafts are used whether or not they pay on this machine
            done = llm.generate(prompts, max_tokens=40, temperature=0, ignore_eos=True)
            found.append([each.tokens for each in done])
            assert sum(each.timings.drafts[spec].drafted for each in done if each.timings.drafts) > 0
            if spec == "lookahead":
                assert sum(each.timings.drafts[spec].accepted for each in done) > 0
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("names", "mode", "shares"),
    [
        ("cpu,cpu@a", "layer", (1, 1)),
        ("cpu,cpu@a", "tensor", (0, 1)),
        ("(cpu,cpu),(cpu)@a", None, (1, 1, 1)),
    ],
)
def test_a_draft_model_runs_on_the_devices_of_this_process(
    names: str, mode: str | None, shares: tuple[int, ...], bundled: Path, workers: list[WorkerProcess]
) -> None:
    options = OPTIONS | {"split_mode": mode, "tensor_split": shares, "n_threads": 1}
    prompts = ["Once upon a time there was a fox. The fox", "One two one two one two one"]
    with LLM(bundled, devices=devices(names, []), spec="off", **options) as llm:
        done = llm.generate(prompts, max_tokens=40, temperature=0, ignore_eos=True)
        expected = [each.tokens for each in done]
    with LLM(
        bundled, devices=devices(names, workers), draft_model=bundled_draft_path(), spec="draft", **options
    ) as llm:
        (companion,) = llm._loaded.companions
        assert len(companion.runner.memory()) == names.split("@")[0].count("cpu") - 1
        assert all(own["weights"] > 0 for own in companion.runner.memory())
        speculator = llm._loaded.engine.speculator
        assert speculator is not None
        speculator._control = FixedControl()
        done = llm.generate(prompts, max_tokens=40, temperature=0, ignore_eos=True)
        assert sum(each.timings.drafts["draft"].accepted for each in done if each.timings.drafts) > 0
    assert [each.tokens for each in done] == expected


@pytest.mark.parametrize(
    ("names", "mode"),
    [("cpu,cpu@a,cpu@b", "tensor"), ("cpu,cpu@a", "layer"), ("cpu,(cpu,cpu)@a", None)],
)
def test_only_candidates_of_samplers_travel(
    names: str,
    mode: str | None,
    random_llama: Path,
    workers: list[WorkerProcess],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole rows travel where a request needs them: all its answers are those of one process."""
    monkeypatch.setenv("MOTLEY_SHARED_MEMORY", "0")  # as between machines
    kinds: list[tuple[dict[str, Any], bool]] = [
        ({"temperature": 0}, True),
        ({"top_k": 20, "seed": 1}, True),
        ({"top_k": 0, "top_p": 0.9, "seed": 1}, False),
        ({"temperature": 0, "repeat_penalty": 1.3}, False),
        ({"temperature": 0, "logit_bias": {7: 3.0}}, False),
        ({"temperature": 0, "logprobs": 3}, False),
        ({"top_k": 100000, "seed": 3}, False),
    ]
    found = []
    for crew in ([], workers):
        texts, rows = [], []
        with LLM(random_llama, devices=devices(names, crew), split_mode=mode, spec="off", **OPTIONS) as llm:
            for sampling, _ in kinds:
                done = llm.generate([TOKENS[:20], TOKENS[3:9]], max_tokens=8, ignore_eos=True, **sampling)
                texts.append([each.tokens for each in done])
                wanted = [entry.top for each in done for entry in each.logprobs or ()]
                assert all(np.isfinite([value for _, value in top]).all() for top in wanted)
                if crew:
                    hosts = llm._loaded.runner._hosts
                    assert hosts is not None
                    rows.append(hosts.link.mesh._n_best > 0)
            assert np.isfinite(llm.logits(TOKENS[:10])).all()
        found.append(texts)
    assert found[0] == found[1]
    assert rows == [is_short for _, is_short in kinds]


@pytest.mark.parametrize("names", ["cpu,cpu@a", "cpu@a,cpu"])
def test_embeddings(names: str, random_llama: Path, workers: list[WorkerProcess]) -> None:
    found = []
    for crew in ([], workers):
        with LLM(random_llama, devices=devices(names, crew), split_mode="tensor", **OPTIONS) as llm:
            found.append(np.asarray(llm.embed(TOKENS[:20])))
    assert np.array_equal(*found)


@pytest.mark.parametrize(("names", "mode"), [("cpu,cpu@a", "tensor"), ("cpu,(cpu,cpu)@a", None)])
def test_context_shift(
    names: str, mode: str | None, random_llama: Path, workers: list[WorkerProcess]
) -> None:
    """The context is full several times: each worker rotates the keys of its heads."""
    found = []
    for crew in ([], workers):
        options = OPTIONS | {"n_ctx": 64, "split_mode": mode}
        with LLM(random_llama, devices=devices(names, crew), **options) as llm:
            sampling = {"max_tokens": 120, "temperature": 0, "ignore_eos": True, "context_shift": True}
            found.append(llm.generate(TOKENS[:30], n_keep=4, **sampling).tokens)
    assert found[0] == found[1]


def test_sessions_are_the_same_bytes_and_load_anywhere(
    random_llama: Path, workers: list[WorkerProcess], tmp_path: Path
) -> None:
    options = OPTIONS | {"split_mode": "tensor", "tensor_split": (1, 1), "n_ctx": 1024, "n_batch": 512}
    tokens = (TOKENS * 10)[:600]  # more than one message has room for
    for name, crew in (("one", []), ("several", workers)):
        with LLM(random_llama, devices=devices("cpu,cpu@a", crew), **options) as llm:
            llm.save_session(tmp_path / name, tokens)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "several").read_bytes()
    with LLM(random_llama, devices=devices("cpu,cpu@a", workers), **options) as llm:
        assert llm.load_session(tmp_path / "one") == tokens
        done = llm.generate([*tokens, 7], max_tokens=8, temperature=0)
    with LLM(random_llama, devices="cpu", n_ctx=1024) as llm:
        alone = llm.generate([*tokens, 7], max_tokens=8, temperature=0)
    assert done.timings.cached_tokens >= 592
    assert done.tokens == alone.tokens


def test_memory_of_all_devices_is_shown(random_llama: Path, workers: list[WorkerProcess]) -> None:
    names = devices("cpu,cpu@a", workers)
    with LLM(random_llama, devices=names, split_mode="tensor", tensor_split=(3, 1), **OPTIONS) as llm:
        llm.generate(TOKENS[:5], max_tokens=2)
        memory, cache = llm.device_memory(), llm.kv_stats()
    assert list(memory) == ["cpu", f"cpu@{workers[0].address}"]
    assert all(own["weights"] > 0 and own["activations"] > 0 for own in memory.values())
    assert [device.reserved for device in cache.devices] == [m["kv_cache"] for m in memory.values()]


def test_a_demand_paged_cache_is_given_back_on_all_hosts(
    random_llama: Path, workers: list[WorkerProcess]
) -> None:
    names = devices("cpu,cpu@a", workers)
    options = OPTIONS | {"n_ctx": 2048, "n_batch": 512, "kv_cache_demand_paged": True, "prefix_cache": False}
    with LLM(random_llama, devices=names, split_mode="tensor", **options) as llm:
        with llm.raw_sequence() as sequence:
            sequence.fill_with_random(1500)
            used = [device.resident for device in llm.kv_stats().devices]
        freed = [device.resident for device in llm.kv_stats().devices]
    assert all(after < before for before, after in zip(used, freed, strict=True))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("cpu,cpu@", "is not the address of a worker"),
        ("cpu,cpu@host:99999", "is not the address of a worker"),
        ("cpu,tpu@host", "unknown device 'tpu' of host:29400"),
    ],
)
def test_names_of_devices_are_checked(names: str, message: str) -> None:
    with pytest.raises((ConfigError, DeviceError), match=message):
        make_crew(names)


def test_rank_0_reads_logits_where_all_devices_are_of_workers(
    bundled: Path, workers: list[WorkerProcess]
) -> None:
    """By the command line: memory and text are those of the named devices."""
    command = [
        sys.executable,
        "-m",
        "motley",
        "run",
        str(bundled),
        "-p",
        "Once upon",
        "-n",
        "12",
        "--temp",
        "0",
    ]
    texts = []
    for crew in ([], workers):
        names = devices("(cpu,cpu)@a,(cpu)@b", crew)
        done = subprocess.run(
            [*command, "--device", names, "-ts", "3,1,2", "-c", "64", "-t", "1"],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert len(texts[0].strip()) > 20
    assert texts[0] == texts[1]
    with LLM(bundled, devices=devices("cpu@a,cpu@b", workers), n_threads=1, **OPTIONS) as llm:
        memory = llm.device_memory()
    assert list(memory) == ["cpu", f"cpu@{workers[0].address}", f"cpu@{workers[1].address}"]
    assert [own["kv_cache"] > 0 for own in memory.values()] == [False, True, True]
    assert memory["cpu"]["weights"] == 0


def test_a_crew_knows_its_processes() -> None:
    crew = make_crew("cpu,cpu:0-3@b:1,cpu@a,cpu@b:1,cpu@[::1]:7", "tensor")
    assert crew.hosts == ("b:1", "a:29400", "[::1]:7")
    assert crew.owners == (0, 1, 2, 1, 3)
    assert crew.members(1) == (1, 3)
    assert crew.label(1) == "cpu:0-3@b:1"
