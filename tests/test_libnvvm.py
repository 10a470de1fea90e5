"""Which libNVVM assembles: told by its wheel, or by the file of an installed toolkit, looked for once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tileloom.runtime import libnvvm
from tileloom.runtime.cache import VARIABLE

Looked = list[Path]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libnvvm.so"
    path.write_bytes(b"one")
    return path


@pytest.fixture
def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Path) -> Looked:
    """A machine with numba-cuda and a toolkit but no wheel of libNVVM; what was found, as often as numba-cuda looked."""
    found: Looked = []

    def path() -> str:
        found.append(library)
        return str(library)

    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(libnvvm, "version", lambda package: "none" if package == libnvvm.WHEEL else "1")
    monkeypatch.setitem(sys.modules, "tileloom.runtime.cuda", SimpleNamespace(libnvvm_path=path))
    return found


def test_a_wheel_says_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libnvvm, "version", lambda package: {libnvvm.WHEEL: "13.0.88"}[package])
    assert libnvvm.libnvvm() == "13.0.88"


def test_a_library_is_looked_for_once(looked: Looked, library: Path) -> None:
    told = libnvvm.libnvvm()
    assert str(library) in told
    assert libnvvm.libnvvm() == told
    assert len(looked) == 1


def test_another_file_at_that_place_is_another_library(looked: Looked, library: Path) -> None:
    first = libnvvm.libnvvm()
    library.write_bytes(b"three")
    longer = libnvvm.libnvvm()
    facts = library.stat()
    os.utime(library, ns=(facts.st_atime_ns, facts.st_mtime_ns + 1))
    assert len({first, longer, libnvvm.libnvvm()}) == 3
    assert len(looked) == 1


def test_a_library_that_is_gone_is_looked_for_again(looked: Looked, library: Path) -> None:
    first = libnvvm.libnvvm()
    library.unlink()
    assert libnvvm.libnvvm() == str(library) != first
    library.write_bytes(b"two")
    assert libnvvm.libnvvm() not in (first, str(library))
    assert len(looked) == 2


def _another_toolkit(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("CUDA_HOME", str(folder))


def _another_search(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(libnvvm, "version", lambda package: "none" if package == libnvvm.WHEEL else "2")


def _another_loader_cache(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "loader").write_bytes(b"")
    patch.setattr(libnvvm, "LOADER_CACHE", str(folder / "loader"))


def _another_environment(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(sys, "prefix", str(folder))


@pytest.mark.parametrize(
    "change", [_another_toolkit, _another_search, _another_loader_cache, _another_environment]
)
def test_where_it_may_be_elsewhere_it_is_looked_for_again(
    looked: Looked,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: Callable[[pytest.MonkeyPatch, Path], None],
) -> None:
    libnvvm.libnvvm()
    change(monkeypatch, tmp_path)
    libnvvm.libnvvm()
    libnvvm.libnvvm()
    assert len(looked) == 2
