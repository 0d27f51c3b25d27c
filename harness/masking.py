"""Secrets are never printed or recorded: values whose name or form gives them away are replaced."""

from __future__ import annotations

import re

SECRET = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|KEY", re.IGNORECASE)
URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
MASK = "***"


def masked(name: str, value: str) -> str:
    """The value of an environment variable or option as it may be shown."""
    return MASK if SECRET.search(name) else URL_LOGIN.sub(MASK, value)


def masked_arguments(arguments: list[str]) -> list[str]:
    """A command line with the values of options that name a secret masked (`--api-token x`, `--api-token=x`)."""
    shown: list[str] = []
    for position, word in enumerate(arguments):
        option, separator, _ = word.partition("=")
        before = arguments[position - 1] if position else ""
        if word.startswith("-") and separator and SECRET.search(option):
            word = f"{option}={MASK}"
        elif before.startswith("-") and "=" not in before and SECRET.search(before) and not word.startswith("-"):
            word = MASK
        shown.append(URL_LOGIN.sub(MASK, word))
    return shown
