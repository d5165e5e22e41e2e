"""`lapis playground`: a local page to draw points on."""

from __future__ import annotations

import webbrowser
from contextlib import suppress
from typing import Annotated

import typer

from lapis.cli.shell import one_thread, readable, say


@readable
def playground(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any that is free.")] = 8000,
    open_browser: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = True,
) -> None:
    """Serve a page on this machine: draw points, choose network and prior, watch the posterior follow."""
    from lapis.playground import serve

    with serve(port) as server, one_thread():
        say(f"The playground is at {server.address} (Ctrl-C ends it).")
        if open_browser:
            webbrowser.open(server.address)
        with suppress(KeyboardInterrupt):
            server.serve_forever()
