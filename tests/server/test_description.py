"""/openapi.json and /docs: the description covers every route."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import RunningServer

from motley.server.api import ROUTES
from motley.server.api.description import _OPERATIONS, openapi

DESCRIBED = openapi([(method, paths) for method, paths, _ in ROUTES])


@pytest.fixture(scope="module")
def mock() -> Iterator[RunningServer]:
    with RunningServer("--keys", is_mock=True) as running:
        yield running


def test_every_route_is_described_and_nothing_else() -> None:
    assert set(DESCRIBED["paths"]) == {paths[0] for _, paths, _ in ROUTES} == set(_OPERATIONS)
    names = [operation["operationId"] for path in DESCRIBED["paths"].values() for operation in path.values()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", [path for path, of in DESCRIBED["paths"].items() if "post" in of])
def test_required_fields_are_fields(path: str) -> None:
    schema = DESCRIBED["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema.get("required", ())) <= set(schema["properties"])


def test_the_description_and_its_page_need_no_key_and_no_network(mock: RunningServer) -> None:
    assert mock.get("/openapi.json").json() == DESCRIBED
    page = mock.get("/docs")
    assert page.status_code == 200
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for name in ("docs.js", "docs.css"):
        text = mock.get(f"/{name}").text
        assert name in page.text
        assert "http://" not in text
        assert "https://" not in text
