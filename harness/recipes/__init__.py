"""Finding the function that a run is: `--module` names the module, `--config` the function in it. Free of torch.

A module is a short name built in here (`debug`, `llama3`, `workloads`), a path to a .py file, or a dotted name: that
of a file under the working directory (`runs.mine.small` is runs/mine/small.py; `runs/` is no package), else that of an
installed module. `runs.…`, and names in folders without `__init__.py` that an editable install happens to put on the
path, mean files under the working directory and nothing else: never those of another checkout. The function takes no
argument and returns a `Trainer.Config`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import site
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import cast

from harness.config import Trainer
from harness.errors import MeshscopeError, UsageError

BUILT_IN = ("debug", "llama3", "workloads")
FOLDER = "runs"
"""Where a checkout keeps its own run functions; no package."""

Recipe = Callable[[], Trainer.Config]


def load_config(module: str, config: str) -> Trainer.Config:
    """Calls the function `config` of `module` and returns what it returns.

    Raises `UsageError`, one line, if there is no such module or function (with the candidates), if the user's file
    raises (with file:line), or if the function returns something other than a `Trainer.Config`.
    """
    source = _load_module(module)
    candidates = recipes_of(source)
    if config not in candidates:
        known = ", ".join(candidates) or "none: it defines no function annotated `-> Trainer.Config`"
        raise UsageError(f"--module {module} has no configuration {config!r}; it has: {known}")
    with _one_line(source.__file__, f"--config {config}"):
        result = candidates[config]()
    if not isinstance(result, Trainer.Config):
        raise UsageError(f"{module}.{config}() returned {type(result).__name__}, not a Trainer.Config")
    return result


def recipes_of(module: ModuleType) -> dict[str, Recipe]:
    """The public functions that `module` itself defines and that can be called without arguments, in order.

    Where some are annotated to return a `Trainer.Config`, only those.
    """
    functions = {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and not name.startswith("_")
        and function.__module__ == module.__name__
        and not inspect.iscoroutinefunction(function)
    }
    annotated = {name: f for name, f in functions.items() if _returns_config(f)}
    callable_as_is = {name: f for name, f in functions.items() if not _required_parameters(f)}
    return cast(dict[str, Recipe], annotated or callable_as_is)


def _returns_config(function: Callable[..., object]) -> bool:
    returned = function.__annotations__.get("return")
    return returned is Trainer.Config or (isinstance(returned, str) and returned.endswith("Trainer.Config"))


def _required_parameters(function: Callable[..., object]) -> list[str]:
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def _load_module(module: str) -> ModuleType:
    if module in BUILT_IN:
        return importlib.import_module(f"{__name__}.{module}")
    if module.endswith(".py") or os.sep in module:
        path = Path(module)
        if not _is_file(path):
            raise UsageError(f"--module {module}: there is no such file (seen from {Path.cwd()})")
        return _load_file(path)
    parts = module.split(".")
    local = Path(*parts[:-1], f"{parts[-1]}.py")
    elsewhere = None
    if all(part.isidentifier() for part in parts):
        if _is_file(local):
            return _import_local(module, local) if _in_package(local) else _load_file(local)
        with _one_line(None, f"--module {module}"):
            elsewhere = _reason_to_refuse(parts[0])
            if elsewhere is None and _is_installed(module):
                return importlib.import_module(module)
    raise UsageError(
        f"no module {module!r}: built in are {', '.join(BUILT_IN)}; your own is a path to a .py file, "
        f"or a dotted name of one under this folder (here: {local})" + (f"; {elsewhere}" if elsewhere else "")
    )


def _reason_to_refuse(top: str) -> str | None:
    """Why the top-level name `top`, not found under the working directory, is not imported; None if it may be.

    A folder without `__init__.py` counts as installed only where packages are installed to: elsewhere it is one of a
    checkout on the path.
    """
    if top == FOLDER:
        return f"{FOLDER}.… is never taken from another folder"
    spec = importlib.util.find_spec(top)
    if spec is None or spec.has_location or spec.submodule_search_locations is None:
        return None
    installed = [Path(path).resolve() for path in (*site.getsitepackages(), site.getusersitepackages())]
    found = [Path(path).resolve() for path in spec.submodule_search_locations]
    if any(path.is_relative_to(root) for path in found for root in installed):
        return None
    return f"{found[0]} is on the path, but no package: name its file by its path"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # no name that the file system takes
        return False


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent of the dotted name does not exist
        return False


def _in_package(path: Path) -> bool:
    """Whether every folder of the relative `path` is a package, and none of its name is imported already."""
    folders = path.parents[:-1]
    return (
        bool(folders)
        and path.parts[0] not in sys.modules
        and all(_is_file(folder / "__init__.py") for folder in folders)
    )


def _import_local(module: str, path: Path) -> ModuleType:
    """Imports `path` from the working directory, as part of its package: relative imports work."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        with _one_line(str(path.resolve()), f"--module {module}"):
            return importlib.import_module(module)
    finally:
        del sys.path[0]


def _load_file(path: Path) -> ModuleType:
    """Runs a file as a module; what lies beside it, and in the working directory, can be imported by it."""
    name = f"meshscope_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"--module {path}: is not a Python file (its name must end in .py)")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[name] = loaded  # dataclasses look their module up by name
    sys.path[:0] = [str(path.resolve().parent), str(Path.cwd())]
    try:
        with _one_line(str(path.resolve()), f"--module {path}"):
            spec.loader.exec_module(loaded)
    finally:
        del sys.path[:2]
    return loaded


@contextmanager
def _one_line(file: str | None, what: str) -> Iterator[None]:
    """Turns whatever a user's code raises into one line that names its own last line in `file`."""
    try:
        yield
    except MeshscopeError:
        raise
    # Foreign code: it may raise anything, or end the process, and all of it is the user's to see in one line.
    except (Exception, SystemExit) as error:
        place = ""
        if isinstance(error, SyntaxError) and error.filename:
            place = f"{error.filename}:{error.lineno}: "
        else:
            frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
            if frames:
                place = f"{frames[-1].filename}:{frames[-1].lineno}: "
        summary = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
        raise UsageError(f"{what}: {place}{summary}") from None
