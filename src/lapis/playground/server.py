"""The page's server: the standard library's, bound to this machine, for one person at a time."""

from __future__ import annotations

import json
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Lock
from typing import Any

from lapis.errors import LapisError, OptionError
from lapis.options import check_count
from lapis.playground.fitting import answer
from lapis.playground.wishes import MOST_BYTES, read
from lapis.reports.page import asset, plotly_library

HOST = "127.0.0.1"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src data: blob:; connect-src 'self'"
)
PATIENCE = 20.0
"""Seconds that a wish waits for those before it."""


@cache
def _files() -> dict[str, tuple[str, bytes]]:
    """What can be fetched: path to type and contents."""
    own = files("lapis.playground")
    texts = {
        "/": ("text/html", own.joinpath("page.html").read_text(encoding="utf-8")),
        "/page.js": ("text/javascript", own.joinpath("page.js").read_text(encoding="utf-8")),
        "/page.css": ("text/css", asset("page.css") + own.joinpath("page.css").read_text(encoding="utf-8")),
        "/plotly.js": ("text/javascript", plotly_library()),
    }
    return {path: (f"{kind}; charset=utf-8", text.encode()) for path, (kind, text) in texts.items()}


class Handler(BaseHTTPRequestHandler):
    """GET gives the page's files, POST /fit an answer to a wish; whatever is wrong is an answer too."""

    server_version = "Lapis"
    sys_version = ""
    timeout = 30
    """Seconds after which a silent connection is closed."""
    server: Server

    def do_GET(self) -> None:
        if not self._is_for_us():
            return
        found = _files().get(self.path.partition("?")[0])
        if found is None:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")
        else:
            self._send(HTTPStatus.OK, *found)

    def do_POST(self) -> None:
        if not self._is_for_us():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/fit":
            self._refuse(HTTPStatus.NOT_FOUND, "Wishes go to /fit.")
        elif self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "A wish is application/json.")
        elif not length.isascii() or not length.isdigit():
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "A wish says how long it is.")
        elif len(length) > 9 or int(length) > MOST_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"A wish has at most {MOST_BYTES:,} bytes.")
        else:
            self._fit(self.rfile.read(int(length)))

    def _fit(self, body: bytes) -> None:
        if not self.server.busy.acquire(timeout=PATIENCE):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "Busy with earlier wishes.")
            return
        try:
            result = json.dumps(answer(read(body)), allow_nan=False)
        except LapisError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except (ArithmeticError, RuntimeError, ValueError) as error:  # a search that ends in no numbers
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"This could not be computed: {error}")
        else:
            self._send(HTTPStatus.OK, "application/json", result.encode())
        finally:
            self.server.busy.release()

    def _is_for_us(self) -> bool:
        """Pages of other sites may send requests here: neither their names for us nor their origin are ours."""
        names = {f"{host}:{self.server.server_port}" for host in (HOST, "localhost")}
        origin = self.headers.get("Origin")
        ours = self.headers.get("Host") in names and (origin is None or origin.removeprefix("http://") in names)
        if not ours:
            self._refuse(HTTPStatus.FORBIDDEN, "Open the playground by its own address.")
        return ours

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.close_connection = True
        self._send(status, "application/json", json.dumps({"error": why}).encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (
            ("Content-Type", kind),
            ("Content-Length", str(len(body))),
            ("Content-Security-Policy", POLICY),
            ("X-Content-Type-Options", "nosniff"),
            ("Cache-Control", "no-store"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: the terminal belongs to the person who started it."""


class Server(ThreadingHTTPServer):
    """A server that answers one wish at a time."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__((HOST, port), Handler)
        self.busy = Lock()

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{HOST}:{self.server_port}/"


def serve(port: int = 8000) -> Server:
    """A server of the playground on this machine, bound but not yet running: call `serve_forever()` on it.

    Args:
        port: 0 chooses a free one.
    """
    check_count("port", port, least=0, most=65535)
    _files()  # an error here if plotly is missing
    try:
        return Server(port)
    except OSError as error:
        raise OptionError(
            f"Port {port} cannot be used",
            expected="a free port",
            got=str(error.strerror or error),
            do="choose another, or 0 for any that is free",
        ) from error
