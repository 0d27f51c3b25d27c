"""Keeps what a page still says after it was left away from Streamlit.

Until the server's answer to a link is there, the browser takes itself to be on the page that it leaves. What a fragment
of that page asks meanwhile (a timeline that has just been drawn asks for its width) names that page, and Streamlit
does as told: its `ScriptRunner` begins a run of the page that was left, the browser clears the new page for it, and
nothing draws that again.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from streamlit.proto.BackMsg_pb2 import BackMsg


class ForgetsLeftPages:
    """ASGI middleware that drops what fragments of pages that were left ask for."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, Current(receive) if scope["type"] == "websocket" else receive, send)


class Current:
    """A `receive` that passes over what is said for another page than the one asked for last."""

    def __init__(self, receive: Receive) -> None:
        self.receive = receive
        self.page = ""

    async def __call__(self) -> Message:
        while self.is_late(message := await self.receive()):
            pass
        return message

    def is_late(self, message: Message) -> bool:
        try:
            said = BackMsg.FromString(message.get("bytes") or b"")
        except DecodeError:  # which Streamlit refuses
            return False
        if said.WhichOneof("type") != "rerun_script":
            return False
        asked = said.rerun_script
        if asked.fragment_id:
            # The first request of a connection names no page: the browser does not know its hash yet.
            return self.page not in ("", asked.page_script_hash)
        self.page = asked.page_script_hash
        return False
