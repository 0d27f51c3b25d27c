"""Tells the browser where the server is.

Streamlit's page at `/overview` first asks `/overview/_stcore/health` whether the server is below that path, and an
error on the console says that it is not. `window.__streamlit.BACKEND_BASE_URL`, which hosts of Streamlit set, settles
the question before it is asked; a version that does not know it asks as before.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATEMENT = b"<script>window.__streamlit = {BACKEND_BASE_URL: window.location.origin}</script></head>"
# HTML that is compressed, or "not modified" since it was without the statement, cannot be added to.
UNWANTED = (b"accept-encoding", b"if-none-match", b"if-modified-since")


class StatesBase:
    """ASGI middleware that adds `STATEMENT` to the HTML of a page."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_page = scope["type"] == "http" and scope["method"] == "GET" and scope["path"].count("/") == 1
        if is_page:
            headers = [header for header in scope["headers"] if header[0] not in UNWANTED]
            await self.app({**scope, "headers": headers}, receive, Adding(send))
        else:
            await self.app(scope, receive, send)


class Adding:
    """A `send` that holds HTML back until it is whole."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.held: Message | None = None
        self.body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and is_html(message):
            self.held = message
        elif self.held is None:
            await self.send(message)
        else:
            self.body += message.get("body", b"")
            if not message.get("more_body", False):
                await self.send_whole(self.held, self.body.replace(b"</head>", STATEMENT, 1))

    async def send_whole(self, start: Message, body: bytes) -> None:
        headers = MutableHeaders(raw=start["headers"])
        headers["content-length"] = str(len(body))
        for name in ("etag", "last-modified"):
            del headers[name]
        await self.send(start)
        await self.send({"type": "http.response.body", "body": body})


def is_html(start: Message) -> bool:
    return MutableHeaders(raw=start["headers"]).get("content-type", "").startswith("text/html")
