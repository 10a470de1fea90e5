"""What is built and installed: links, wheel, sdist, and the refusal to build without symbolic links."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

import tileloom

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("dsl", "compiler", "runtime")
BUILD_FILES = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
)
DATA = (".py", ".lark", ".tile")

in_checkout = pytest.mark.skipif(
    not (ROOT / "dsl").is_dir(), reason="an unpacked sdist has folders, not links"
)


def package_files() -> set[str]:
    """Names that an installation must have, such as `tileloom/dsl/types.py`."""
    package = ROOT / "src" / "tileloom"
    found = {path for folder in (package, *(package / link for link in LINKS)) for path in folder.rglob("*")}
    names = {
        p.relative_to(package.parent).as_posix() for p in found if p.suffix in DATA or p.name == "py.typed"
    }
    return {name for name in names if "__pycache__" not in name}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what a build reads, links kept as links, so that nothing is written into the real tree."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in BUILD_FILES:
        shutil.copy(ROOT / name, copy)
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", *LINKS):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    return copy


def build(checkout: Path, hook: str) -> subprocess.CompletedProcess[str]:
    """Call a hook of the build back end (`build_wheel`, `build_sdist`), as pip does, without its network."""
    (checkout / "out").mkdir()
    code = f"from setuptools import build_meta; build_meta.{hook}('out')"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=False
    )


def test_version() -> None:
    assert version("tileloom") == tileloom.__version__


@in_checkout
@pytest.mark.parametrize("name", LINKS)
def test_links_resolve(name: str) -> None:
    link = ROOT / "src" / "tileloom" / name
    assert link.is_symlink()
    assert link.readlink().as_posix() == f"../../{name}"
    assert link.resolve() == ROOT / name
    assert (link / "__init__.py").is_file()


@in_checkout
def test_wheel_holds_the_package_and_nothing_else(checkout: Path) -> None:
    done = build(checkout, "build_wheel")
    assert done.returncode == 0, done.stderr
    (wheel,) = (checkout / "out").glob("*.whl")
    assert wheel.name == f"tileloom-{tileloom.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(n).decode() for n in names if n.endswith("/METADATA"))
    info = {name for name in names if name.startswith(f"tileloom-{tileloom.__version__}.dist-info/")}
    assert names - info == package_files()
    assert any(name.endswith("/licenses/LICENSE") for name in info)
    assert "License-Expression: Apache-2.0\n" in metadata


@in_checkout
def test_sdist_holds_the_package(checkout: Path) -> None:
    done = build(checkout, "build_sdist")
    assert done.returncode == 0, done.stderr
    (sdist,) = (checkout / "out").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = {m.name.partition("/")[2]: m for m in archive}
    missing = {f"src/{name}" for name in package_files()} - set(members)
    assert not missing
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]


@in_checkout
def test_build_without_links_is_refused(checkout: Path) -> None:
    link = checkout / "src" / "tileloom" / "compiler"
    link.unlink()
    link.write_text("../../compiler", encoding="utf-8")  # what git leaves with core.symlinks=false
    done = build(checkout, "build_wheel")
    assert done.returncode != 0
    assert not list((checkout / "out").iterdir())
    for word in ("src/tileloom/compiler", "core.symlinks=true", "wheel"):
        assert word in done.stderr


@in_checkout
def test_ci_runs_the_tests_as_the_readme_does() -> None:
    readme = re.search(r"^.*/pytest( .*)?$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    script = re.search(
        r'^"\$venv/bin/pytest"(.*)$', (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert readme is not None
    assert script is not None
    assert script[1].split() == (readme[1] or "").split()
