"""Groups of devices: layers are shared out between them, tensors are split within them."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley import LLM
from motley.bundled import bundled_experts_path
from motley.errors import ConfigError, DeviceError, MotleyError
from motley.gguf import read_spec
from motley.models import BatchShape, GraphOptions, read_params
from motley.runtime import ModelSplit, crew, make_crew
from motley.runtime.expert_fitting import with_cpu_experts
from motley.runtime.explain import explain
from motley.runtime.loading import weight_bytes
from motley.split.collectives import AllReduce, Broadcast, Collective, Receive, Send

ARCHITECTURES = ("gemma3", "gpt-oss", "llama", "phi3", "qwen2", "qwen3moe")
CREWS = (
    ("(cpu,cpu),(cpu)", (3, 1, 2)),
    ("cpu,(cpu,cpu)", (1, 1, 1)),
    ("(cpu,cpu),(cpu,cpu)", (1, 0, 1, 1)),
    ("(cpu,cpu,cpu),cpu,(cpu,cpu)", (1, 1, 1, 0, 1, 3)),
    ("(cpu,cpu),(cpu)", (0, 0, 1)),
    ("(cpu,cpu),(cpu)", (0, 1, 1)),
)
TOLERANCE = 1e-3  # as for other splits
TOKENS: list[int] = np.random.default_rng(3).integers(1, 250, 70).tolist()
OPTIONS: dict[str, Any] = {"n_ctx": 128, "n_parallel": 2, "n_batch": 48, "kv_block_size": 16}
EXACT: dict[str, Any] = {"cache_type_k": "f32", "cache_type_v": "f32", "backend": "reference"}
GREEDY: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        ("(cpu,cpu),(cpu)", ((0, 1), (2,))),
        (" ( cpu , cpu ) , cpu ", ((0, 1), (2,))),
        (["(cpu,cpu)", "(cpu,cpu)@10.0.0.2:29400"], ((0, 1), (2, 3))),
        ("(cpu,cpu@a),cpu", None),
        ("(cpu,cpu)", ()),
        ("(cpu),(cpu)", ()),
        ("(cpu)", ()),
        ("cpu,cpu", ()),
    ],
)
def test_parentheses_make_groups(names: Any, groups: tuple[tuple[int, ...], ...] | None) -> None:
    if groups is None:
        with pytest.raises(DeviceError, match="has devices of several processes"):
            make_crew(names)
    else:
        assert make_crew(names).groups == groups


def test_a_group_has_one_address() -> None:
    found = make_crew("(cpu,cpu),(cpu:0-3,cuda:1)@[::1]:7,(cpu@b,cpu@b),cpu@b")
    hosts = [None, None, "[::1]:7", "[::1]:7", "b:29400", "b:29400", "b:29400"]
    assert [device.host for device in found.devices] == hosts
    assert found.groups == ((0, 1), (2, 3), (4, 5), (6,))
    assert found.owners == (0, 0, 1, 1, 2, 2, 2)
    assert found.label(3) == "cuda:1@[::1]:7"


@pytest.mark.parametrize(
    ("names", "mode"),
    [("(cpu,cpu)", "tensor"), ("(cpu),(cpu)", "layer"), ("(cpu,cpu),cpu", "layer"), ("(cpu)", "none")],
)
def test_parentheses_name_the_mode(names: str, mode: str) -> None:
    assert make_crew(names).mode == make_crew(names, mode).mode == mode


def test_without_a_split_only_the_first_device_works() -> None:
    found = make_crew("(cpu,cpu),cpu", "none")
    assert (len(found), found.groups) == (1, ())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("(cpu,cpu", r"have a \( without a \)"),
        ("cpu),cpu", r"have a \) without a \("),
        ("((cpu,cpu),cpu)", "have parentheses within parentheses"),
        ("(),cpu", r"'\(\)' is no group of devices"),
        ("(cpu,cpu)x,cpu", "is no group of devices"),
        ("x(cpu,cpu),cpu", "is no group of devices"),
        ("(cpu)(cpu)", "is no group of devices"),
        ("cpu,(cpu,cpu)@", "'' is not the address of a worker"),
        ("cpu,(cpu,cpu)@a@b", "'a@b' is not the address of a worker"),
        ("cpu,(cpu@a,cpu)@b", "has worker addresses inside and after its parentheses"),
        ("cpu,(cpu@a,cpu@b)", "has devices of several processes"),
        ("(cpu,tpu),cpu", "unknown device 'tpu'"),
        ("cpu,(cpu,tpu)@a", "unknown device 'tpu' of a:29400"),
        ("(cpu:0,cpu),cpu:0", "core 0 belongs to|may not use 0"),
    ],
)
def test_names_that_make_no_sense_are_refused(names: str, message: str) -> None:
    with pytest.raises(MotleyError, match=message):
        make_crew(names)


@pytest.mark.parametrize(
    ("names", "mode"), [("(cpu,cpu),cpu", "tensor"), ("(cpu,cpu)", "layer"), ("(cpu),(cpu)", "tensor")]
)
def test_a_mode_that_contradicts_the_parentheses_is_refused(names: str, mode: str) -> None:
    with pytest.raises(ConfigError, match=f"split mode {mode}, but parentheses mean"):
        make_crew(names, mode)


def test_experts_apart_are_on_the_cpu_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "known_devices", lambda: ("cpu", "cuda:0", "cuda:1"))
    found = make_crew("(cuda:0,cpu),(cuda:0,cuda:1,cpu)@a,cuda:0@b", n_cpu_moe=3)
    assert found.shares == tuple(map(Fraction, (1, 0, 1, 1, 0, 1)))
    assert found.apart is not None
    assert found.apart.shares == tuple(map(Fraction, (0, 1, 0, 0, 1, 0)))


@pytest.mark.parametrize(
    ("names", "shares", "local"),
    [
        ("cpu,cpu@a", (1, 2), ("none", (1,), ())),
        ("cpu,cpu,cpu@a", (3, 1, 2), ("layer", (3, 1), ())),
        ("cpu,cpu,cpu@a", (0, 0, 2), ("layer", (1, 1), ())),
        ("(cpu,cpu),(cpu)@a", (3, 1, 2), ("tensor", (3, 1), ())),
        ("(cpu,cpu),(cpu,cpu)@a,cpu", (1, 2, 3, 4, 5), ("layer", (1, 2, 5), ((0, 1), (2,)))),
    ],
)
def test_the_devices_of_this_process_are_a_crew(names: str, shares: tuple[int, ...], local: Any) -> None:
    found = make_crew(names, None, shares).local
    assert (found.mode, found.shares, found.groups) == local
    assert not found.hosts
    assert found.local is found


@pytest.mark.parametrize(
    ("names", "mode", "expected"),
    [
        ("cpu@a", None, ("layer", (0, 1), ())),
        ("cpu@a,cpu@b", None, ("layer", (0, 2, 3), ())),
        ("cpu@a,cpu@b", "tensor", ("tensor", (0, 2, 3), ())),
        ("cpu@a,cpu@b", "none", ("layer", (0, 1), ())),
        ("cpu@a,cpu@a", "tensor", ("layer", (0, 2, 3), ((0,), (1, 2)))),  # only logits travel
        ("(cuda:0,cuda:1)@a", None, ("layer", (0, 2, 3), ((0,), (1, 2)))),
        ("(cuda:0,cuda:1)@a,(cpu)@b", None, ("layer", (0, 2, 3, 4), ((0,), (1, 2), (3,)))),
        ("cpu@a,cpu", None, ("layer", (2, 3), ())),
    ],
)
def test_rank_0_needs_no_device_of_its_own(names: str, mode: str | None, expected: Any) -> None:
    n_devices = names.count("cpu") + names.count("cuda")
    shares = (2, 3, 4)[:n_devices]
    found = make_crew(names, mode, shares)
    assert (found.mode, found.shares, found.groups) == expected
    assert 0 in found.owners
    assert [device.full_name for device in found.sharing] == [
        device.full_name for device in found.devices if device.host or names.endswith(",cpu")
    ]
    if "," in names and mode is None:
        assert make_crew(names, None, None, ["1GiB"] * n_devices).devices[-1].memory == 1 << 30


def test_experts_apart_are_never_on_the_device_that_only_reads() -> None:
    found = make_crew("(cuda:0,cpu)@a,(cuda:0,cpu)@b", n_cpu_moe=3)
    assert found.shares == tuple(map(Fraction, (0, 1, 0, 1, 0)))
    assert found.apart is not None
    assert found.apart.shares == tuple(map(Fraction, (0, 0, 1, 0, 1)))
    assert with_cpu_experts(make_crew("cuda:0@a,cuda:0@b")) is None
    flat = make_crew("cuda:0@a,cuda:1@b", n_cpu_moe=3)
    assert flat.apart is not None
    assert flat.apart.shares == tuple(map(Fraction, (0, 0, 1)))


def split_of(path: Path, names: str, shares: tuple[int, ...] | None = None, **options: Any) -> ModelSplit:
    spec = read_spec(path)
    return ModelSplit(spec, read_params(spec), make_crew(names, None, shares, **options), GraphOptions(64))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def golden(request: pytest.FixtureRequest, shared: Path) -> Path:
    path: Path = shared / "golden" / request.param / "model.gguf"
    return path


def test_groups_give_the_logits_of_one_device(golden: Path) -> None:
    tokens = np.load(golden.parent / "tokens.npy")[:48].tolist()
    with LLM(golden, n_ctx=64, **EXACT) as llm:
        expected = llm.logits(tokens)
    for names, shares in CREWS:
        with LLM(golden, devices=names, tensor_split=shares, n_ctx=64, **EXACT) as llm:
            assert np.abs(llm.logits(tokens) - expected).max() <= TOLERANCE, (names, shares)


@pytest.mark.parametrize(
    ("names", "other", "mode"), [("(cpu,cpu)", "cpu,cpu", "tensor"), ("(cpu),(cpu)", "cpu,cpu", "layer")]
)
def test_one_group_and_groups_of_one_have_the_bits_of_flat_crews(
    names: str, other: str, mode: str, random_llama: Path
) -> None:
    found = []
    for devices, split_mode in ((names, None), (other, mode)):
        with LLM(random_llama, devices=devices, split_mode=split_mode, **OPTIONS) as llm:
            found.append(llm.logits(TOKENS))
    assert np.array_equal(*found)


def test_a_step_of_native_groups_is_one_call(random_llama: Path) -> None:
    with LLM(random_llama, devices="(cpu,cpu),(cpu)", **OPTIONS) as llm:
        text = llm.generate(TOKENS[:20], **GREEDY).tokens
        steps = llm._loaded.runner.local._steps.values()
        assert steps
        assert all(step.joint is not None for step in steps)
    with LLM(random_llama, devices="cpu", **OPTIONS) as llm:
        assert llm.generate(TOKENS[:20], **GREEDY).tokens == text


@pytest.mark.parametrize(("names", "shares"), CREWS)
def test_groups_talk_within_and_hand_over_once(
    names: str, shares: tuple[int, ...], random_llama: Path
) -> None:
    """Sums are those of a layer's own group; one message leaves each group that has layers, and the logits go back."""
    split = split_of(random_llama, names, shares)
    busy = [members for members in split.crew.groups if any(shares[d] for d in members)]
    counted: Counter[str] = Counter()
    for device in range(len(split.crew)):
        graph = split.share(device, BatchShape(3, 1)).graph
        own = next(members for members in split.crew.groups if device in members)
        for node in graph.nodes:
            if isinstance(node.op, AllReduce):
                assert node.op.members == own
            elif isinstance(node.op, Send | Receive):
                assert device in {members[0] for members in busy}
                counted[node.op.name] += 1
        last = [node for node in graph.nodes if isinstance(node.op, Collective)][-1]
        assert last in graph.outputs
        assert last.op == Broadcast(busy[-1][0], last.shape)
        assert bool(last.inputs) == (device == busy[-1][0])
    assert counted == ({"send": len(busy) - 1, "receive": len(busy) - 1} if len(busy) > 1 else {})


def test_devices_get_their_shares(bundled: Path) -> None:
    split = split_of(bundled, "(cpu,cpu),(cpu)", (3, 1, 4))
    loaded = [weight_bytes(split.share(device, BatchShape(1, 1))) for device in range(3)]
    assert loaded[0] / sum(loaded) == pytest.approx(3 / 8, abs=0.1)
    assert loaded[2] / sum(loaded) == pytest.approx(4 / 8, abs=0.1)


def test_heads_are_repeated_in_large_groups_only(shared: Path) -> None:
    """Two KV heads on five devices are stored several times, those of a group of one once."""
    path = shared / "golden" / "llama" / "model.gguf"
    split = split_of(path, "(cpu,cpu,cpu,cpu),cpu", (1, 1, 1, 1, 4))
    repeats = [split.kv_repeat(group) for group in range(2)]
    assert repeats[0] > repeats[1] == 1
    assert explain(split)["kv_repeat"] == repeats[0]
    tokens = np.load(path.parent / "tokens.npy")[:40].tolist()
    found = []
    for names in ("cpu", "(cpu,cpu,cpu,cpu),cpu"):
        with LLM(path, devices=names, n_ctx=64, **EXACT) as llm:
            found.append(llm.logits(tokens))
    assert np.abs(found[0] - found[1]).max() <= TOLERANCE


def test_a_session_of_any_crew_continues_on_groups(shared: Path, tmp_path: Path) -> None:
    """Sessions hold heads in the model's order, however groups have split and repeated them."""
    path = shared / "golden" / "llama" / "model.gguf"
    tokens = np.load(path.parent / "tokens.npy")[:48].tolist()
    crews = ("cpu", "(cpu,cpu,cpu,cpu),cpu", "(cpu,cpu),(cpu)")
    texts = []
    for index, names in enumerate(crews):
        other = crews[index - 1]
        with LLM(path, devices=other, **OPTIONS, **EXACT) as llm:
            llm.save_session(tmp_path / "session", tokens)
        with LLM(path, devices=names, **OPTIONS, **EXACT) as llm:
            assert llm.load_session(tmp_path / "session") == tokens
            done = llm.generate([*tokens, 7], **GREEDY)
            assert done.timings.cached_tokens >= 48
            texts.append(done.tokens)
    assert texts[0] == texts[1] == texts[2]


def test_windows_quantized_caches_and_figures_of_the_cache(random_gemma3: Path) -> None:
    options = OPTIONS | {"cache_type_k": "q8_0", "cache_type_v": "q4_0", "backend": "reference"}
    found = []
    for names in ("cpu", "(cpu,cpu),(cpu)"):
        with LLM(random_gemma3, devices=names, **options) as llm:
            found.append((llm.generate(TOKENS[:60], **GREEDY).tokens, llm.kv_stats()))
    (text, alone), (other, groups) = found
    assert text == other
    assert len(groups.devices) == 3
    assert sum(device.reserved for device in groups.devices) == alone.devices[0].reserved
    assert groups.layout.bytes_per_token == alone.layout.bytes_per_token


def test_recurrent_states_and_fewer_layers(shared: Path, tmp_path: Path) -> None:
    path = shared / "golden" / "qwen3next" / "model.gguf"
    tokens = np.load(path.parent / "golden.npz")["tokens"].tolist()[:40]
    found = []
    for names in ("cpu", "(cpu,cpu),(cpu)"):
        with LLM(path, devices=names, backend="reference", **OPTIONS) as llm:
            llm.save_session(tmp_path / "session", tokens)
            assert llm.load_session(tmp_path / "session") == tokens
            done = [llm.generate(tokens, **GREEDY), llm.generate(tokens, n_layer_exit=1, **GREEDY)]
            found.append((llm.logits(tokens), [each.tokens for each in done]))
    assert np.abs(found[0][0] - found[1][0]).max() <= TOLERANCE
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("expert_split", [None, (0, 1, 1, 0)])
def test_experts_apart_within_groups(expert_split: tuple[int, ...] | None) -> None:
    found = []
    for names, apart in (
        ("cpu", {}),
        ("(cpu,cpu),(cpu,cpu)", {"n_cpu_moe": 3, "expert_split": expert_split}),
    ):
        with LLM(bundled_experts_path(), devices=names, **apart, **OPTIONS, **EXACT) as llm:
            found.append((llm.logits(TOKENS), llm.generate(TOKENS[:20], **GREEDY).tokens))
    assert np.abs(found[0][0] - found[1][0]).max() <= 1e-2
    assert found[0][1] == found[1][1]


def test_the_context_shifts_on_groups(random_llama: Path) -> None:
    found = []
    for names in ("cpu", "(cpu,cpu),(cpu)"):
        with LLM(random_llama, devices=names, **(OPTIONS | EXACT | {"n_ctx": 64})) as llm:
            options = GREEDY | {"max_tokens": 100, "context_shift": True, "n_keep": 4}
            found.append(llm.generate(TOKENS[:30], **options).tokens)
    assert found[0] == found[1]


def test_explain_shows_a_group_that_only_reads(random_llama: Path) -> None:
    contents = explain(split_of(random_llama, "(cpu,cpu)@a,(cpu)@b", (1, 1, 1)))
    messages = [row for section in contents["sections"] for row in section["collectives"]]
    assert [row["kind"] for row in messages].count("broadcast") == 1
    assert "the process of the command needs it" in messages[-1]["reason"]


def test_explain_shows_groups_and_their_messages(random_llama: Path) -> None:
    contents = explain(split_of(random_llama, "(cpu,cpu),(cpu)", (1, 1, 1)))
    split = split_of(random_llama, "(cpu,cpu),(cpu)", (1, 1, 1))
    assert contents["groups"] == [[0, 1], [2]]
    assert contents["split_mode"] == "layer"
    n_first = sum(c["kind"] == "all_reduce" for s in contents["sections"] for c in s["collectives"])
    assert contents["collectives"] == {"all_reduce": n_first, "send": 1, "broadcast": 1}
    assert n_first % 2 == 0
    assert 0 < n_first < 2 * split.params.n_layers
    names = [section["name"] for section in contents["sections"]]
    assert len(set(names)) == len(names)
    assert names[-1] == "output"
    hidden = 4 * split.params.n_embd
    sends = [c for s in contents["sections"] for c in s["collectives"] if c["kind"] == "send"]
    assert [c["bytes_per_token"] for c in sends] == [hidden]
    for section in contents["sections"]:
        listed = [row["name"] for row in section["tensors"]]
        assert len(set(listed)) == len(listed)
