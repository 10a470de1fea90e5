"""`tileloom doctor`: what it shows, and when it says that something is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tileloom import __version__
from tileloom.__main__ import main
from tileloom.runtime.cache import Store


def test_doctor_shows_versions_and_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILELOOM_CACHE_DIR", str(tmp_path))
    Store(tmp_path).put("group", bytes(1000))
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    words = [line.split() for line in shown.splitlines()]
    assert ["tileloom", __version__] in words
    assert {"numba", "llvmlite", "processor", "threads", "GPU", "cache"} <= {w[0] for w in words if w}
    assert "1 entries, " in shown
    assert str(tmp_path) in shown.replace("\n", "")


def test_doctor_says_why_the_cache_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("TILELOOM_CACHE_DIR", str(tmp_path / "open"))
    assert main(["doctor"]) == 1
    assert "others can write to it (mode 777)" in capsys.readouterr().out
