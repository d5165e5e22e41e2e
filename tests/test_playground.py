"""The playground over HTTP: answers are those of the library, and bad input ends in a message, never in silence."""

from __future__ import annotations

import http.client
import json
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lapis
from lapis.cli import app
from lapis.playground import server as playground
from lapis.playground.fitting import EXTENT
from lapis.playground.wishes import MOST_BYTES, MOST_POINTS

WISH: dict[str, Any] = {
    "task": "regression", "points": [[-1.0, -0.8], [0.0, 0.1], [0.5, 0.4], [1.0, 0.9]], "layers": 1, "units": 3,
    "activation": "tanh", "structure": "dense", "link": "quasi", "tune": False, "precision": 0.5, "noise": 0.3,
    "seed": 1,
}  # fmt: skip
CLASSES = {"task": "classification", "points": [[-1.0, 0.0, 0], [-0.5, 0.5, 0], [1.0, 0.0, 1], [0.8, -0.4, 1]]}


@pytest.fixture(scope="module")
def server() -> Iterator[playground.Server]:
    """Without plotly, which is only needed by the browser."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(playground, "plotly_library", lambda: "var Plotly;")
        playground._files.cache_clear()
        with playground.serve(0) as running:
            thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            yield running
            running.shutdown()
            thread.join()
    playground._files.cache_clear()


def asked(
    server: playground.Server, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, Any, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    of_json = reply.headers.get_content_type() == "application/json"
    return reply.status, json.loads(text) if of_json else text, reply.headers


def fitted(server: playground.Server, wish: Any) -> tuple[int, Any]:
    body = wish if isinstance(wish, bytes) else json.dumps(wish).encode()
    return asked(server, "POST", "/fit", body, Content_Type="application/json")[:2]


def test_the_page_and_its_files_are_served_to_this_machine_only(server: playground.Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for path, kind in (("/", "html"), ("/page.js", "javascript"), ("/page.css", "css"), ("/plotly.js", "javascript")):
        status, text, headers = asked(server, "GET", path)
        assert status == 200
        assert kind in headers["Content-Type"]
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert text
    assert asked(server, "GET", "/../server.py")[0] == 404
    assert asked(server, "GET", "/", Host="evil.example")[0] == 403
    assert asked(server, "POST", "/fit", b"{}", Origin="http://evil.example")[0] == 403
    assert asked(server, "DELETE", "/")[0] == 501


def test_without_hidden_layers_the_answer_is_that_of_bayesian_linear_regression(server: playground.Server) -> None:
    """y = X w + noise with w ~ N(0, I / 0.5): evidence and predictions in closed form."""
    status, found = fitted(server, WISH | {"layers": 0})
    assert status == 200
    table = torch.tensor(WISH["points"], dtype=torch.float64)
    features, y = torch.stack([table[:, 0], torch.ones(4).double()], 1), table[:, 1]
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(4).double(), features @ features.mT / 0.5 + 0.09 * torch.eye(4).double()
    )
    assert found["log_evidence"] == pytest.approx(float(marginal.log_prob(y)), abs=1e-6)
    precision = features.mT @ features / 0.09 + 0.5 * torch.eye(2).double()
    covariance = precision.inverse()
    x = torch.tensor(found["x"], dtype=torch.float64)
    grid = torch.stack([x, torch.ones_like(x)], 1)
    variance = ((grid @ covariance) * grid).sum(1)
    assert found["mean"] == pytest.approx((grid @ covariance @ features.mT @ y / 0.09).tolist(), abs=1e-6)
    assert found["function_std"] == pytest.approx(variance.sqrt().tolist(), abs=1e-6)
    assert found["std"] == pytest.approx((variance + 0.09).sqrt().tolist(), abs=1e-6)
    assert found["effective_parameters"] == pytest.approx(float(2 - 0.5 * covariance.trace()), abs=1e-6)
    assert (found["weights"], found["precision"], found["noise"]) == (2, 0.5, pytest.approx(0.3))
    assert x[0] == -EXTENT


@pytest.mark.parametrize("structure", ["kronecker", "diagonal"])
def test_every_structure_answers_and_the_evidence_chooses_prior_and_noise(
    structure: str, server: playground.Server
) -> None:
    wave = WISH | {"structure": structure, "points": [[x / 4, math.sin(x / 2)] for x in range(-8, 9)]}
    status, found = fitted(server, wave | {"tune": True})
    assert status == 200
    assert all(wide > narrow for wide, narrow in zip(found["std"], found["function_std"], strict=True))
    by_hand = fitted(server, wave | {"precision": 10.0, "noise": 0.5})[1]
    assert found["log_evidence"] > by_hand["log_evidence"]


@pytest.mark.parametrize("link", ["quasi", "mean_field", "probit", "bridge", "mc"])
def test_a_map_is_high_where_class_one_is(link: str, server: playground.Server) -> None:
    status, found = fitted(server, WISH | CLASSES | {"link": link, "layers": 0})
    assert status == 200
    rows = found["probability"]
    assert len(rows) == len(rows[0]) == len(found["x"]) == 45
    middle = rows[22]
    assert middle[5] < 0.5 < middle[39]  # to the left and to the right, at height zero


def test_a_seed_decides_the_network_and_torch_is_left_alone(server: playground.Server) -> None:
    state = torch.get_rng_state()
    one, same, other = (fitted(server, WISH | {"seed": seed})[1] for seed in (1, 1, 2))
    assert one["mean"] == same["mean"]
    assert one["mean"] != other["mean"]
    assert torch.equal(torch.get_rng_state(), state)


BAD: list[tuple[Any, str]] = [
    (b"", "JSON"), (b"{", "JSON"), (b"[]", "object"), (b"[" * 20000, "JSON"), (b"\xff\xfe", "JSON"), ({}, "entries"),
    (WISH | {"more": 1}, "entries"), (WISH | {"task": "poetry"}, "task"), (WISH | {"task": ["regression"]}, "task"),
    (WISH | {"points": []}, "points"), (WISH | {"points": [[0, 0]] * (MOST_POINTS + 1)}, "points"),
    (WISH | {"points": [[0]]}, "point"), (WISH | {"points": [[0, None]]}, "coordinate"),
    (WISH | {"points": "all"}, "points"),
    (WISH | {"points": [[0, math.nan]]}, "coordinate"), (WISH | {"points": [[0, 1e9]]}, "coordinate"),
    (WISH | {"points": [[0, 10**400]]}, "coordinate"), (WISH | CLASSES | {"points": [[0, 0, 2]]}, "class"),
    (WISH | {"layers": 3}, "layers"), (WISH | {"units": 0}, "units"), (WISH | {"units": 1e3}, "units"),
    (WISH | {"tune": "yes"}, "tune"), (WISH | {"precision": 0}, "precision"), (WISH | {"noise": -1}, "noise"),
    (WISH | {"structure": "__import__"}, "structure"), (WISH | {"seed": True}, "seed"), (WISH | {"link": None}, "link"),
]  # fmt: skip


def test_bad_wishes_get_a_message_and_the_server_lives_on(server: playground.Server) -> None:
    for wish, word in BAD:
        status, found = fitted(server, wish)
        assert status == 400, wish
        assert word in found["error"]
    assert fitted(server, b" " * (MOST_BYTES + 1))[0] == 413
    assert asked(server, "POST", "/fit", b"{}", Content_Type="text/plain")[0] == 415
    assert asked(server, "POST", "/fit", b"{}", Content_Type="application/json", Content_Length="-1")[0] == 411
    assert asked(server, "POST", "/other", b"{}", Content_Type="application/json")[0] == 404
    assert fitted(server, WISH)[0] == 200


def test_a_search_that_ends_in_no_numbers_is_told(server: playground.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(wish: Any) -> Any:
        return {"log_evidence": math.nan}

    monkeypatch.setattr(playground, "answer", fails)
    status, found = fitted(server, WISH)
    assert status == 500
    assert "could not be computed" in found["error"]


def test_one_point_is_enough(server: playground.Server) -> None:
    for wish in (
        WISH | {"points": [[0.0, 1.0]], "tune": True},
        WISH | CLASSES | {"points": [[0.0, 1.0, 1]], "tune": True},
    ):
        status, found = fitted(server, wish)
        assert status == 200
        assert math.isfinite(found["log_evidence"])


def test_a_port_in_use_and_a_missing_plotly_are_errors_in_words(
    server: playground.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(lapis.OptionError, match="0 for any that is free"):
        playground.serve(server.server_port)
    result = CliRunner().invoke(app, ["playground", "--no-open", "--port", str(server.server_port)])
    assert result.exit_code == 1
    assert "cannot be used" in result.stderr


def test_the_command_says_where_the_page_is(server: playground.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Any) -> None:
        raise KeyboardInterrupt

    opened: list[str] = []
    monkeypatch.setattr(playground.Server, "serve_forever", stop)
    monkeypatch.setattr("webbrowser.open", opened.append)
    result = CliRunner().invoke(app, ["playground", "--port", "0"])
    assert result.exit_code == 0
    assert opened[0].startswith("http://127.0.0.1:")
    assert opened[0] in result.stdout
