"""What every browser session runs: the sidebar, and the page that the URL names."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import streamlit as st

from dashboard import pages, state, states
from harness.errors import MeshscopeError

# A name of a Material symbol here would be fetched from elsewhere.
ICON = Path(__file__).parent / "entry" / "icon.svg"


@cache
def page_modules() -> list[ModuleType]:
    """The modules of `dashboard.pages` in their order; the first is where one lands."""
    names = [module.name for module in pkgutil.iter_modules(pages.__path__)]
    return sorted((importlib.import_module(f"{pages.__name__}.{name}") for name in names), key=lambda m: m.ORDER)


def guarded(draw: Callable[[], None]) -> Callable[[], None]:
    """A page that explains what cannot be shown rather than showing an exception."""

    def page() -> None:
        try:
            draw()
        except MeshscopeError as error:
            states.broken(error)

    return page


def name_of(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def main() -> None:
    st.set_page_config(page_title="meshscope", page_icon=str(ICON), layout="wide")
    modules = page_modules()
    for module in modules:
        state.PAGES[name_of(module)] = st.Page(
            guarded(module.page),
            title=module.TITLE,
            icon=module.ICON,
            url_path=name_of(module),
            default=module is modules[0],
        )
    chosen = st.navigation(list(state.PAGES.values()), position="hidden")
    with st.sidebar:
        sidebar(modules)
    chosen.run()


def sidebar(modules: list[ModuleType]) -> None:
    """The pages about the folder, then the choice of a run and the pages about that."""
    st.markdown(f"**meshscope**  \n:small[:gray[{states.escaped(str(state.root()))}]]")
    about_folder = st.container(gap="xxsmall")
    there_is_one = state.choose_run()  # first, since every link names the run
    with about_folder:
        links([module for module in modules if module.ABOUT == "folder"])
    if there_is_one:
        with st.container(gap="xxsmall"):
            links([module for module in modules if module.ABOUT == "run"])


def links(modules: list[ModuleType]) -> None:
    for module in modules:
        state.link(name_of(module), module.TITLE, icon=module.ICON)
