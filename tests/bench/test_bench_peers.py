"""What the comparison with other engines rests on: a longer saved context, ratios round by round."""

from __future__ import annotations

import shutil
import struct
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))


def benchmark(name: str) -> Any:
    return import_module(f"benchmarks.{name}")


def saved(cells: list[bytes], *, transposed: bool) -> bytes:
    """One layer, a sequence of these cells; K is three bytes of each, V four (two values of two bytes)."""
    parts = [struct.pack("<IiII", 7, 0, 1, len(cells))]
    parts += [struct.pack("<iIi", position, 1, 0) for position in range(len(cells))]
    parts += [struct.pack("<II", transposed, 1), struct.pack("<iQ", 8, 3), *(cell[:3] for cell in cells)]
    if transposed:
        columns = [cell[i : i + 2] for i in (3, 5) for cell in cells]
        parts += [struct.pack("<iII", 1, 2, 2), *columns]
    else:
        parts += [struct.pack("<iQ", 1, 4), *(cell[3:] for cell in cells)]
    return b"".join(parts)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_saved_context_grows_by_repeating_its_cells_at_the_next_positions(transposed: bool) -> None:
    stretch = benchmark("peer_llama_state").stretch
    cells = [b"0abcdef", b"1ghijkl", b"2mnopqr"]
    state = saved(cells, transposed=transposed)
    assert stretch(state, 3) == state
    assert stretch(state, 8) == saved((cells * 3)[:8], transposed=transposed)
    assert stretch(state, 2) == saved(cells[:2], transposed=transposed)


def test_a_saved_context_of_another_layout_is_refused() -> None:
    stretch = benchmark("peer_llama_state").stretch
    state = saved([b"0abcdef"], transposed=False)
    for wrong in (state[:-1], state + b"x", struct.pack("<IiII", 7, 0, 2, 1) + state[16:]):
        with pytest.raises(ValueError, match="another layout"):
            stretch(wrong, 4)


def test_rounds_of_slow_and_of_fast_memory_are_shown_by_themselves() -> None:
    peers = benchmark("peers")
    rates = {"motley f16": [11.0, 12.0, 20.0, 30.0], "llama.cpp f16": [10.0, 10.0, 10.0, 20.0]}
    memory = [30e9, 33e9, 34e9, 60e9, 58e9]  # it changed in the third round
    comparison = peers.Comparison("tiny", peers.Workload("decode 4", 1, 4, 0), rates, memory)
    assert comparison.by_memory().splitlines() == [
        "- memory: 34.0 GB/s (30.0 … 60.0)",
        "- memory below 42 GB/s, 2 rounds: motley f16 11.5, llama.cpp f16 10.0, **1.15** (1.10 … 1.20)",
        "- memory above 42 GB/s, 1 rounds: motley f16 30.0, llama.cpp f16 20.0, **1.50** (1.50 … 1.50)",
    ]
    steady = peers.Comparison("tiny", comparison.workload, rates, [33e9] * 5)
    assert steady.by_memory() == "- memory: 33.0 GB/s (33.0 … 33.0)\n"


def test_the_memory_probe_reads() -> None:
    probe = benchmark("memory_probe")
    assert probe.MemoryProbe(1, 2**24).bytes_per_second() > 0


def test_ratios_are_of_the_same_round_not_of_the_medians() -> None:
    peers = benchmark("peers")
    rates = {"motley f16": [10.0, 20.0, 60.0], "llama.cpp f16": [5.0, 20.0, 20.0]}
    comparison = peers.Comparison("tiny", peers.Workload("decode 4", 1, 4, 0), rates, [30e9] * 4)
    assert comparison.ratios("motley f16", "llama.cpp f16") == [1.0, 2.0, 3.0]
    assert comparison.table().splitlines()[2:] == [
        "| motley f16 | 20 |  |",
        "| llama.cpp f16 | 20 | **2.00** (1.00 … 3.00) |",
    ]


def test_transformers_gets_as_many_layers_as_the_others() -> None:
    config = benchmark("peers").transformers_config
    whole, part = config("llama-160m"), config("llama-160m", 3)
    assert whole["num_hidden_layers"] == 12
    assert part == whole | {"num_hidden_layers": 3}


def test_engines_take_turns_in_both_orders() -> None:
    peers = benchmark("peers")
    turns = []

    class Engine:
        def __init__(self, name: str) -> None:
            self.name = name

        def warm_up(self, workload: Any) -> None:
            turns.append(self.name.upper())

        def rate(self, workload: Any) -> float:
            turns.append(self.name)
            return float(len(turns))

    class Probe:
        def bytes_per_second(self) -> float:
            return 30e9

    found = peers.compare([Engine("a"), Engine("b")], "tiny", peers.Workload("decode 4", 1, 4, 0), 2, Probe())
    assert turns == ["A", "B", "a", "b", "b", "a"]
    assert found.rates == {"a": [3.0, 6.0], "b": [4.0, 5.0]}


def test_without_amx_llama_cpp_gets_everything_else_that_the_processor_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    amx = benchmark("peer_amx")
    monkeypatch.setattr(amx, "_instruction_sets", lambda: {"avx", "avx2", "amx_tile"})
    flags = amx.cmake_args().split()
    assert "-DGGML_NATIVE=OFF" in flags
    assert {"-DGGML_AVX2=ON", "-DGGML_AVX512=OFF"} <= set(flags)
    assert "AMX" not in amx.cmake_args()


def test_amx_is_not_suspected_where_the_processor_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    amx = benchmark("peer_amx")
    amx.amx_is_broken.cache_clear()
    monkeypatch.setattr(amx, "_instruction_sets", lambda: {"avx2"})
    monkeypatch.setattr(amx.subprocess, "run", lambda *a, **k: pytest.fail("nothing needs to be tried"))
    assert amx.amx_is_broken() is False
    amx.amx_is_broken.cache_clear()


AVX2 = "CPU : AVX = 1 | AVX2 = 1 | FMA = 1 | "
BUILDS = {"avx2": AVX2, "avx_vnni": f"{AVX2}AVX_VNNI = 1 | ", "avx512": f"{AVX2}AVX512 = 1 | "}


@pytest.mark.parametrize("isa", BUILDS)
def test_kernels_are_compared_with_a_build_for_the_same_instructions(isa: str) -> None:
    require_set = benchmark("peers").require_set
    for built, about in {**BUILDS, "avx512_vnni": f"{BUILDS['avx512']}AVX512_VNNI = 1 | "}.items():
        require_set("", about)
        if built == isa:
            require_set(isa, about)
        else:
            with pytest.raises(SystemExit, match=f"ISA={isa}"):
                require_set(isa, about)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize(
    ("isa", "flag"),
    [("avx2", "-DGGML_AVX512=OFF"), ("avx_vnni", "-DGGML_AVX_VNNI=ON"), ("avx512", "-DGGML_AVX512=ON")],
)
def test_make_builds_llama_cpp_for_one_instruction_set(isa: str, flag: str, tmp_path: Path) -> None:
    folder = tmp_path / "peers"  # where none is built yet
    call = ["make", "-n", f"{folder}/.installed", f"ISA={isa}", f"PEERS_FOLDER={folder}", "STAMP="]
    done = subprocess.run(call, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    flags = done.stdout.split()
    assert "-DGGML_NATIVE=OFF" in flags
    assert flag in [each.strip('"') for each in flags]
