"""Serving the explorer on this machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tntprune.app.choices import ExploredModel
from tntprune.errors import UserError

LARGEST = "20mb"  # of an uploaded file
SESSIONS = 20  # whose pictures are remembered
WAITING = 20  # requests at most
QUIET = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}


@contextmanager
def served(model: ExploredModel, host: str = "127.0.0.1", port: int | None = None) -> Iterator[str]:
    """Serve the explorer for as long as the context lasts.

    Everything that is uploaded or drawn lies in a temporary folder, which is removed at the end.

    Args:
        model: The one that the page begins with.
        host: The address to listen at; 127.0.0.1 is reached from this machine only.
        port: The port; None takes the first free one from 7860 on.

    Yields:
        The page's address.

    Raises:
        UserError: Gradio is not installed, or the address cannot be used.
    """
    with TemporaryDirectory(prefix="tntprune-app-") as name, _environment({**QUIET, "GRADIO_TEMP_DIR": name}):
        try:
            import gradio as gr
        except ImportError:
            raise UserError("the explorer needs Gradio; install it with: pip install 'tntprune[app]'") from None
        from tntprune.app.examples import example_photos
        from tntprune.app.page import CSS, Models, build

        page = build(Models(model), example_photos(model.model, _folder(name)))
        page.queue(max_size=WAITING)
        theme = gr.themes.Soft(
            primary_hue="teal", font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
        )
        try:
            _, address, _ = page.launch(
                server_name=host, server_port=port, share=False, inbrowser=False, quiet=True, prevent_thread_lock=True,
                max_file_size=LARGEST, state_session_capacity=SESSIONS, ssr_mode=False, enable_monitoring=False,
                footer_links=[], theme=theme, css=CSS,
            )  # fmt: skip
        except OSError as error:
            raise UserError(
                f"{host}:{port or 'a port from 7860 on'} cannot be used ({error}); expected another --port"
            ) from None
        try:
            yield address
        finally:
            page.close(verbose=False)


def serve(model: ExploredModel, host: str, port: int | None, tell: Callable[[str], Any]) -> None:
    """Serve the explorer until Ctrl-C.

    Args:
        model: See `served`.
        host: See `served`.
        port: See `served`.
        tell: Called with the page's address.
    """
    with served(model, host, port) as address:
        tell(address)
        threading.Event().wait()


def _folder(name: str) -> Path:
    folder = Path(name, "examples")
    folder.mkdir()
    return folder


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
