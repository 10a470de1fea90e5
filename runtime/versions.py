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
    named, unnamed = _installed()
    found = named.get(_normal(package))
    if found is not None or not unnamed:
        return found or "none"
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def _installed() -> tuple[dict[str, str], bool]:
    """Packages by normal name, of folders `name-version.dist-info` (PyPA, "Recording installed projects"), and whether
    there may be others: in an archive, or with the older metadata whose name need not state a version."""
    named: dict[str, str] = {}
    unnamed = False
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            unnamed |= os.path.isfile(folder)
            continue
        for name in names:
            if name.endswith(".dist-info"):
                package, _, told = name.removesuffix(".dist-info").partition("-")
                named.setdefault(_normal(package), told)
            unnamed |= name.endswith((".egg-info", ".egg", ".egg-link"))
    return named, unnamed


def _normal(package: str) -> str:
    return re.sub("[-_.]+", "_", package).lower()
