"""Which devices, how much of each, and what is refused before anything is loaded."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motley.errors import ConfigError, DeviceError, MotleyError
from motley.runtime import cores, make_crew
from motley.runtime import crew as crew_module
from motley.units import parse_bytes

GIB = 1024**3


def fractions(*values: int | str) -> tuple[Fraction, ...]:
    return tuple(map(Fraction, values))


def test_one_device_is_not_split() -> None:
    crew = make_crew()
    assert len(crew) == 1
    assert (crew.mode, crew.shares, crew.label(0)) == ("none", fractions(1), "cpu")
    assert crew.devices[0].memory is None


def test_the_same_name_stands_for_several_devices() -> None:
    crew = make_crew("cpu, cpu,cpu", "tensor")
    assert len(crew) == 3
    assert crew.shares == fractions(1, 1, 1)
    assert [crew.label(i) for i in range(3)] == ["cpu#0", "cpu#1", "cpu#2"]


def test_several_devices_share_layers_unless_told_otherwise() -> None:
    assert make_crew(["cpu", "cpu"]).mode == "layer"


@pytest.mark.parametrize("asked", ["3,0,1.5", (3, 0, 1.5), ["3", "0", "3/2"]])
def test_proportions_are_exact(asked: Any) -> None:
    assert make_crew("cpu,cpu,cpu", "tensor", asked).shares == fractions(3, 0, "3/2")


def test_proportions_follow_the_budgets_unless_given() -> None:
    crew = make_crew("cpu,cpu", "tensor", device_memory="2GiB,1GiB")
    assert [device.memory for device in crew.devices] == [2 * GIB, GIB]
    assert crew.shares[0] == 2 * crew.shares[1]
    assert make_crew("cpu,cpu", "tensor", "1,1", "2GiB,1GiB").shares == fractions(1, 1)


def test_without_a_split_only_the_first_device_works() -> None:
    crew = make_crew("cpu,cpu", "none", "3,1", "2GiB,1GiB")
    assert len(crew) == 1
    assert crew.devices[0].memory == 2 * GIB


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Three NUMA nodes; of their cores 0-9 this process may use 0-3, 5 and 6."""
    for node, listed in enumerate(("0-2,5", "3,4,6", "7-9")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{listed}\n")
    monkeypatch.setattr(cores, "NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 5, 6}, raising=False)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ("cpu,cpu:0-2", [(), (0, 1, 2)]),
        ("cpu:2,cpu:0+5+1", [(2,), (0, 5, 1)]),
        ("cpu:5-6+0-2", [(5, 6, 0, 1, 2)]),
        ("cpu:node0,cpu:node1", [(0, 1, 2, 5), (3, 6)]),
    ],
)
def test_devices_keep_to_the_cores_they_name(devices: str, expected: list[tuple[int, ...]]) -> None:
    crew = make_crew(devices)
    assert [device.cores for device in crew.devices] == expected
    assert [crew.label(i) for i in range(len(crew))] == devices.split(",")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("devices", "asked", "expected"),
    [
        ("cpu", 3, [3]),
        ("cpu,cpu", 7, [3, 3]),
        ("cpu,cpu", 1, [1, 1]),
        ("cpu:0-2,cpu:5", None, [3, 1]),
        ("cpu:0-2,cpu,cpu", 8, [3, 2, 2]),
        ("cpu:0-2,cpu", 2, [3, 1]),
    ],
)
def test_each_core_has_a_thread_and_other_devices_share_the_rest(
    devices: str, asked: int | None, expected: list[int]
) -> None:
    assert make_crew(devices).threads(asked) == expected


@pytest.mark.usefixtures("machine")
def test_threads_are_not_asked_for_twice() -> None:
    with pytest.raises(ConfigError, match="2 threads, but the devices name their cores"):
        make_crew("cpu:0-1,cpu:2").threads(2)


def test_where_threads_cannot_be_bound_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    with pytest.raises(DeviceError, match="does not bind threads"):
        make_crew("cpu:0")


@pytest.mark.parametrize(
    ("value", "n_bytes"),
    [
        ("2GiB", 2 * GIB),
        ("2G", 2 * GIB),
        ("2 gb", 2 * GIB),
        ("1.5KiB", 1536),
        ("512M", 512 * 1024**2),
        ("1T", 1024**4),
        ("77", 77),
        ("77B", 77),
        (77, 77),
    ],
)
def test_amounts_of_memory(value: str | int, n_bytes: int) -> None:
    assert parse_bytes(value) == n_bytes


REFUSALS: list[tuple[dict[str, Any], type[MotleyError], str]] = [
    ({"devices": ""}, DeviceError, "no devices were named (there are: cpu"),
    ({"devices": []}, DeviceError, "no devices were named"),
    ({"devices": "cpu,tpu"}, DeviceError, "unknown device 'tpu' (there are: cpu"),
    ({"devices": "cpu,cpu:"}, DeviceError, "cpu: names no cores (for example cpu:0-7"),
    ({"devices": "cpu:0-x"}, DeviceError, "cpu:0-x names no cores"),
    ({"devices": "cpu:3-2"}, DeviceError, "cpu:3-2 names no cores"),
    ({"devices": "cpu:0-9"}, DeviceError, "cpu:0-9: this process may not use 4+7-9 (it may use 0-3+5-6)"),
    ({"devices": "cpu:0-1+1"}, DeviceError, "cpu:0-1+1 names a core twice"),
    ({"devices": "cpu:0-2,cpu:3,cpu:1"}, DeviceError, "core 1 belongs to cpu:0-2 and cpu:1"),
    ({"devices": "cpu:node7"}, DeviceError, "cpu:node7: no such NUMA node (there are: node0, node1, node2)"),
    ({"devices": "cpu:node2"}, DeviceError, "may use none of the node's cores (it may use 0-3+5-6)"),
    ({"split_mode": "rows"}, ConfigError, "unknown split mode 'rows' (there are: none, layer, tensor)"),
    ({"tensor_split": "1"}, ConfigError, "has 1 numbers, but the number of devices is 2"),
    ({"tensor_split": (1, 2, 3)}, ConfigError, "has 3 numbers, but the number of devices is 2"),
    ({"devices": "cpu", "split_mode": None, "tensor_split": "3,1"}, ConfigError, "number of devices is 1"),
    ({"tensor_split": "0,0"}, ConfigError, "is not a proportion"),
    ({"tensor_split": "-1,2"}, ConfigError, "is not a proportion (numbers are 0 or more"),
    ({"tensor_split": "one,two"}, ConfigError, "'one,two' is not a list of numbers"),
    ({"tensor_split": "1/0,1"}, ConfigError, "is not a list of numbers"),
    ({"tensor_split": "nan,1"}, ConfigError, "is not a list of numbers"),
    ({"tensor_split": (float("inf"), 1)}, ConfigError, "is not a list of numbers"),
    ({"device_memory": "2GiB"}, ConfigError, "1 memory budgets for 2 devices"),
    ({"device_memory": "2GiB,lots"}, ConfigError, "'lots' is not an amount of memory"),
    ({"device_memory": "2GiB,-1"}, ConfigError, "'-1' is not an amount of memory"),
    ({"device_memory": "2GiB,0"}, ConfigError, "'0' is not an amount of memory"),
    ({"device_memory": (2.5e9, -3)}, ConfigError, "is not an amount of memory"),
]


@pytest.mark.usefixtures("machine")
def test_proportions_may_be_an_array() -> None:
    crew = make_crew("cpu,cpu", "tensor", np.array([3.0, 1.0]))
    assert crew.shares[0] == 3 * crew.shares[1]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("options", "error", "message"), REFUSALS, ids=lambda value: str(value)[:40])
def test_what_cannot_be_meant_is_refused(
    options: dict[str, Any], error: type[MotleyError], message: str
) -> None:
    with pytest.raises(error) as refusal:
        make_crew(**({"devices": "cpu,cpu", "split_mode": "tensor"} | options))
    assert message in str(refusal.value)
    assert refusal.value.hint


def test_a_gpu_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew_module, "known_devices", lambda: ("cpu",))
    with pytest.raises(DeviceError, match="torch sees no GPU"):
        make_crew("cuda:0")
