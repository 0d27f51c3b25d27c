"""The server: Streamlit's, with settings of its own, on this machine's loopback address only.

    python dashboard/serve.py PORT

`discover.ROOT_VARIABLE` and `store.CACHE_VARIABLE` name the folder to show and the one for results. Every setting is
given here, so no configuration file is needed, and none can open the server to others.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import streamlit as st
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware

from dashboard import files
from dashboard.base import StatesBase
from dashboard.charts import OKABE_ITO
from dashboard.leaving import ForgetsLeftPages
from harness.worker import die_with_parent

ADDRESS = "127.0.0.1"
HOSTS = [ADDRESS, "localhost"]

SETTINGS = {
    "server.address": ADDRESS,
    "server.headless": True,
    "server.allowedHosts": HOSTS,
    "server.fileWatcherType": "none",
    "server.runOnSave": False,
    "server.enableStaticServing": False,
    "server.disconnectedSessionTTL": 30,
    "browser.gatherUsageStats": False,
    "browser.serverAddress": ADDRESS,
    "client.toolbarMode": "minimal",
    "client.showErrorDetails": "full",
    "client.showErrorLinks": False,
    "client.showSidebarNavigation": False,
    "runner.magicEnabled": False,
    "logger.level": "warning",
    "global.suppressDeprecationWarnings": False,
    "theme.chartCategoricalColors": OKABE_ITO,
    "theme.baseFontSize": 14,
    "theme.baseRadius": "4px",
    "theme.headingFontSizes": ["1.6rem", "1.2rem", "1.05rem", "1rem", "1rem", "1rem"],
    "theme.metricValueFontSize": "1.35rem",
    "theme.paddingTop": "2rem",
    "theme.sidebar.paddingTop": "0.5rem",
    "theme.light.primaryColor": "#0072B2",
    "theme.dark.primaryColor": "#56B4E9",
}


def main(port: int) -> None:
    # A name that a stranger's page made mean this machine is refused, for every request.
    trusted = Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)
    app = st.App(
        Path(__file__).parent / "entry" / "script.py",
        middleware=[trusted, Middleware(StatesBase), Middleware(ForgetsLeftPages)],
        routes=files.routes(),
    )
    app.run(config={**SETTINGS, "server.port": port})


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    main(int(sys.argv[1]))
