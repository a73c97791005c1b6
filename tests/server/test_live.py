"""/motley/live: what it sends, and that it does not keep the server from ending."""

from __future__ import annotations

import json

from serving import WAIT, RunningServer

from motley.server.live import Counts, LiveFeed


def test_rates_are_since_the_event_before_and_count_running_answers() -> None:
    feed = LiveFeed("m")
    first = feed.snapshot({}, {}, Counts(n_new=10), now=1.0)
    assert first["rates"] == {"prompt": 0.0, "new": 0.0}
    assert first["devices"] == []
    second = feed.snapshot({}, {}, Counts(n_new=10, n_prompt=30, slots=[(0, 100, 20)]), now=3.0)
    assert second["rates"] == {"prompt": 15.0, "new": 10.0}
    assert second["totals"]["new_tokens"] == 30
    # The answer has ended: its tokens have moved from the slot to the sum.
    third = feed.snapshot({}, {}, Counts(n_new=30), now=4.0)
    assert third["rates"]["new"] == 0.0


def test_shares_are_of_the_weights() -> None:
    devices = {"a": {"weights": 300, "kv_cache": 5}, "b": {"weights": 100}}
    event = LiveFeed("m").snapshot({"devices": devices, "n_ctx": 64}, {}, Counts(), now=0.0)
    assert [(device["name"], device["share"]) for device in event["devices"]] == [("a", 0.75), ("b", 0.25)]
    assert event["model"]["n_ctx"] == 64


def test_the_stream_shows_the_engine_and_ends_with_the_server() -> None:
    with RunningServer("-c", "256", "-np", "2", "-t", "1", "--device", "cpu,cpu", "-sm", "tensor") as server:
        server.wait_until_ready()
        with server.get("/motley/live", stream=True) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith(b"data: "))
            event = json.loads(next(lines)[6:])
            assert [device["name"] for device in event["devices"]] == ["cpu#0", "cpu#1"]
            assert event["cache"]["groups"][0]["n_blocks"] > 0
            server.ok("/completion", {"prompt": "Once", "n_predict": 4})
            while event["totals"]["requests"] == 0:  # tokens are counted while the request still runs
                event = json.loads(next(lines)[6:])
            assert event["totals"]["requests"] == 1
            assert event["totals"]["new_tokens"] == 4
            assert server.stop() == 0
            assert not any("Traceback" in line for line in server.log)
            assert list(lines) is not None
    assert server.process.wait(WAIT) == 0
