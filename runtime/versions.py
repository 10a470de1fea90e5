"""Versions of installed packages, as keys of the cache folder name them.

`importlib.metadata` reads and parses a file for each, which takes 2 ms; the names of the folders say as much.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache


@cache
def version(package: str) -> str:
    """The version of an installed package, `none` where there is none."""
    found = _named_by_folders().get(_normal(package))
    if found is not None:
        return found
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def _named_by_folders() -> dict[str, str]:
    """Packages by normal name, of folders `name-version.dist-info` (PyPA, "Recording installed projects")."""
    found: dict[str, str] = {}
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for name in names:
            if name.endswith(".dist-info"):
                package, _, told = name.removesuffix(".dist-info").partition("-")
                found.setdefault(_normal(package), told)
    return found


def _normal(package: str) -> str:
    return re.sub("[-_.]+", "_", package).lower()
