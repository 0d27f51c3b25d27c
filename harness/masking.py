"""Secrets are never printed or recorded: values whose name or form gives them away are replaced."""

from __future__ import annotations

import re

SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
MASK = "***"


def masked(name: str, value: str) -> str:
    """The value of an environment variable or option as it may be shown."""
    return MASK if SECRET.search(name) else URL_LOGIN.sub(MASK, value)
