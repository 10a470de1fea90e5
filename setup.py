"""Refuses to build from a checkout whose links became text files; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

PACKAGE = Path(__file__).resolve().parent / "src" / "tileloom"

flattened = [name for name in ("dsl", "compiler", "runtime") if not (PACKAGE / name).is_dir()]
if flattened:
    raise SystemExit(
        f"tileloom cannot be built from this checkout: {', '.join(f'src/tileloom/{name}' for name in flattened)} "
        "must be a symbolic link to a folder, but the checkout was made without symbolic links.\n"
        "Clone again with links (git clone -c core.symlinks=true …; on Windows this needs developer mode), "
        "or install the wheel."
    )

setup()
