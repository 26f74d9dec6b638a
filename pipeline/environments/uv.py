"""What uv is told, and what it says when it fails. It doesn't read pip's settings, so where pip looks for packages is passed on.

Standard library only.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

KEPT = (
    "UV_CACHE_DIR", "UV_CONCURRENT_", "UV_CONFIG_FILE", "UV_DEFAULT_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_HTTP_",
    "UV_INDEX", "UV_INSECURE_HOST", "UV_KEYRING_PROVIDER", "UV_LINK_MODE", "UV_NATIVE_TLS", "UV_NO_CONFIG", "UV_OFFLINE",
    "UV_SYSTEM_CERTS",
)  # fmt: skip
"""What of uv's own variables the user has a say in: where packages come from and how they get here. Another one may choose other
packages, another folder, or leave hashes unchecked."""

# Option of pip -> uv's variable for it, what stands between several values, and uv's older name, which may be set instead.
SAME = {
    "index-url": ("UV_DEFAULT_INDEX", " ", "UV_INDEX_URL"),
    "extra-index-url": ("UV_INDEX", " ", "UV_EXTRA_INDEX_URL"),
    "find-links": ("UV_FIND_LINKS", ",", ""),
    "trusted-host": ("UV_INSECURE_HOST", " ", ""),
    "timeout": ("UV_HTTP_TIMEOUT", " ", ""),
    "default-timeout": ("UV_HTTP_TIMEOUT", " ", ""),
    "retries": ("UV_HTTP_RETRIES", " ", ""),
    "cert": ("SSL_CERT_FILE", " ", ""),
    "client-cert": ("SSL_CLIENT_CERT", " ", ""),
    "proxy": ("ALL_PROXY", " ", ""),
}
MISMATCH = (
    re.compile(
        r"Hash mismatch for `(?P<package>[^`]+)`\s+Expected:\s+(?P<locked>.+?)\s+Computed:\s+(?P<found>\S+)",
        re.DOTALL,
    ),
    re.compile(
        r"^\s*(?P<package>\S+==\S+) from .*?Expected (?P<locked>sha256 \w+).*?Got +(?P<found>\w+)",
        re.DOTALL | re.MULTILINE,
    ),
)
"""As uv says it, and as pip does."""


def pip_settings(listed: str) -> dict[str, str]:
    """Option -> value from what `pip config list` prints: variables win over `pip install`'s own section, that over all commands'."""
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in found:
            found[section][option] = str(ast.literal_eval(value))
    return found["global"] | found["install"] | found[":env:"]


def uv_variables(inherited: Mapping[str, str], pip: Mapping[str, str]) -> dict[str, str]:
    """The variables that uv runs with: what the user told it stays, what the user told pip comes with it.

    As pip does, all indexes count as one; a hash keeps what only bears a package's name out.
    """
    variables = {
        name: value
        for name, value in inherited.items()
        if not name.startswith("UV_") or name.startswith(KEPT)
    }
    for option, (name, between, older) in SAME.items():
        if pip.get(option, "").split() and name not in variables and older not in variables:
            variables[name] = between.join(pip[option].split())
    variables.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    variables.setdefault("UV_LINK_MODE", "hardlink")  # copies where the cache is on another disk
    return variables | {"UV_NO_PROGRESS": "1", "NO_COLOR": "1", "UV_PYTHON_DOWNLOADS": "never"}


def uv_options(pip: Mapping[str, str]) -> list[str]:
    """Options of `uv pip` that no variable stands for."""
    return ["--no-index"] if pip.get("no-index", "").lower() in {"1", "true", "yes", "on"} else []


def is_mismatch(said: str) -> bool:
    """Whether a file was refused for its hash."""
    return any(pattern.search(said) for pattern in MISMATCH)


def cause(said: str) -> str | None:
    """Why a command failed, in one clause from what uv, pip or Python said; None where nothing of it says so."""
    for pattern in MISMATCH:
        if found := pattern.search(said):
            locked = found["locked"].replace("sha256 ", "sha256:").split()
            return (
                f"the file that was found for {found['package']} isn't the one that was locked (sha256 "
                f"{_short(found['found'])}, in the lock {' or '.join(map(_short, locked[:2]))}{' …' * (len(locked) > 2)}): somebody "
                "changed it where pip is told to look for packages, or it is damaged"
            )
    lines = [line.strip() for line in said.splitlines()]
    starts = [index for index, line in enumerate(lines) if line.startswith("error: ")]
    if starts:
        told = [lines[starts[-1]], *(line for line in lines[starts[-1] + 1 :] if line.startswith("cause: "))]
        return ": ".join(line.split(": ", 1)[1].rstrip(".") for line in told)
    errors = [line for line in lines if "error" in line.lower() and "WARNING" not in line]
    return errors[-1] if errors else None


def _short(digest: str) -> str:
    return f"{digest.removeprefix('sha256:')[:12]}…"
