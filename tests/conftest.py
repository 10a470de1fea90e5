"""For all tests: those marked `gpu` are skipped, and counted in the summary, where there is no CUDA device; drawn
examples have no time limit each, because the first of a shape compiles, and are the same ones in each run but with
`--slow`."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

# What tests compile is kept between runs, beside what pytest itself keeps, and not in the user's own folder.
KEPT = Path(__file__).parent.parent / ".pytest_cache" / "tileloom"
os.environ["TILELOOM_CACHE_DIR"] = str(KEPT)
# NumPy's products in the oracles are small; threads of theirs would only spin beside those of the other workers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow", action="store_true", help="all cases and rounds of tests that otherwise take a few"
    )


def pytest_configure(config: pytest.Config) -> None:
    again = not config.getoption("--slow")
    settings.register_profile("tileloom", parent=settings(), deadline=None, derandomize=again)
    settings.load_profile("tileloom")


@pytest.fixture(autouse=True)
def own_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's tiles are decided by the first sizes of a class that are seen: in a test by its own, not by those of a
    test that happened to run before it. Machine code of the same source is shared all the same."""
    from tileloom import variants

    read = variants.read
    monkeypatch.setattr(
        variants,
        "read",
        lambda folder, *asked: None if folder.folder == KEPT else read(folder, *asked),
    )


@pytest.fixture
def slow(request: pytest.FixtureRequest) -> bool:
    """Whether a test that can go on for minutes is asked to."""
    return bool(request.config.getoption("--slow"))


@cache
def missing_device() -> str | None:
    """Why no CUDA device can be used, or None where one can. Asks the driver itself: numba stays unimported."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return "no CUDA driver"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "no CUDA device"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing_device()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for kind in ("passed", "failed", "skipped") for r in terminalreporter.getreports(kind)]
    marked = {
        r.nodeid: r.outcome for r in reports if "gpu" in getattr(r, "keywords", ())
    }  # a skipped module has none
    if marked:
        skipped = sum(outcome == "skipped" for outcome in marked.values())
        reason = missing_device()
        why = f" ({reason})" if reason else ""
        terminalreporter.write_line(f"gpu tests: {len(marked) - skipped} run, {skipped} skipped{why}")
