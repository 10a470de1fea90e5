"""The cache folder: faults of kinds cache and race (shared/cases/faults.md), torn files, trust, size, what rebuilds what.

Each process of these tests is one run of `RUN` on a cache folder of the test's own; it reports how often Numba compiled.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest

import tileloom as tl
from tileloom.runtime import cache
from tileloom.runtime.cache import SUFFIX, Store, Unusable, refusal

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src"
EXAMPLES = ROOT / "examples"

# Arguments as JSON: the file, the kernel, options of compile, threads, a statement to run first.
RUN = """
import json, sys, threading
import numpy as np
given = json.loads(sys.argv[1])
exec(given["first"])
import tileloom as tl
from numba.core import event
kernel = tl.compile(tl.load(given["file"])[given["kernel"]], **given["options"])
from tileloom.inputs import made, shape_of
from tileloom.dsl.types import DType
graph = kernel.graph({t: DType.F32 for t in given["typed"]})
extents = {**{e: int(graph.example.get(e, 5)) for e in graph.extents}, **given["extents"]}
scalars = {
    s: int(graph.example.get(s, 2)) if t.dtype.is_integer else float(graph.example.get(s, 0.5))
    for s, t in graph.scalars.items()
}
inputs = made(graph, extents, scalars)
results = []
def call():
    found = kernel(**inputs, **scalars)
    found = found if isinstance(found, tuple) else () if found is None else (found,)
    found += tuple(inputs[n] for n, t in graph.tensors.items() if t.inout)
    results.append([float(np.nan_to_num(x.astype(np.float64)).sum()) for x in found])
threads = [threading.Thread(target=call) for _ in range(given["threads"])]
with event.install_recorder("numba:compile") as recorder:
    for t in threads: t.start()
    for t in threads: t.join()
names = [e.data["dispatcher"].py_func.__name__ for _, e in recorder.buffer if e.is_start]
print(json.dumps({"results": results, "compiled": sum("_tasks" in n for n in names)}))
"""
TWICE = "fn half(x) = x / 2\nfn unused(x) = x / 3\n"
USES = (
    'import "b.tile"\nkernel halved(x: f32[N]) -> y: f32[N] {\n    example N = 5\n    y[i] = half(x[i])\n}\n'
)
OTHER = "kernel other(x: f32[N]) -> y: f32[N] {\n    example N = 5\n    y[i] = unused(x[i])\n}\n"


def start(cache: Path, file: Path, kernel: str, **changes: Any) -> subprocess.Popen[str]:
    given = {
        "file": str(file), "kernel": kernel, "options": {}, "threads": 1, "first": "", "typed": [], "extents": {},
        **{k: v for k, v in changes.items() if k != "sources"},
    }  # fmt: skip
    environment = {
        **os.environ,
        "TILELOOM_CACHE_DIR": str(cache),
        "PYTHONPATH": str(changes.get("sources", SOURCES)),
    }
    return subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps(given)],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert not err, err
    found: dict[str, Any] = json.loads(out)
    return found


def run(cache: Path, file: Path, kernel: str, **changes: Any) -> dict[str, Any]:
    return finish(start(cache, file, kernel, **changes))


def entries(cache: Path, kind: str) -> int:
    return sum(1 for group in cache.glob(f"{kind}-*") for _ in group.glob(f"*{SUFFIX}"))


def made_by(cache: Path, file: Path, kernel: str, **changes: Any) -> tuple[int, int]:
    """How many compilations and how many pieces of machine code a run adds to the folder."""
    before = entries(cache, "kernel"), entries(cache, "code")
    run(cache, file, kernel, **changes)
    return entries(cache, "kernel") - before[0], entries(cache, "code") - before[1]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "b.tile").write_text(TWICE)
    (tmp_path / "a.tile").write_text(USES + OTHER)
    return tmp_path / "a.tile"


# ---------------------------------------------------------------- what rebuilds what


def test_B072_an_edited_import_rebuilds_what_uses_it(tmp_path: Path, program: Path) -> None:
    cache = tmp_path / "cache"
    (before,) = run(cache, program, "halved")["results"]
    run(cache, program, "other")
    (tmp_path / "b.tile").write_text(TWICE.replace("x / 2", "x * 2"))
    again = run(cache, program, "halved")
    assert again["results"] == [[pytest.approx(4 * before[0])]]
    assert again["compiled"] == 1
    assert made_by(cache, program, "other") == (0, 0)
    program.write_text("# a remark\n" + USES + OTHER)
    assert made_by(cache, program, "halved") == (0, 0)


def test_B075_options_and_settings_are_part_of_the_key(tmp_path: Path, program: Path) -> None:
    cache = tmp_path / "cache"
    assert made_by(cache, program, "halved") == (1, 1)
    assert made_by(cache, program, "halved", options={"precise": True})[0] == 1
    assert made_by(cache, program, "halved", options={"precise": True}) == (0, 0)
    assert made_by(cache, program, "halved") == (0, 0)
    setting = "import os; os.environ['NUMBA_OPT'] = '1'"
    assert made_by(cache, program, "halved", first=setting) == (0, 1)
    assert made_by(cache, program, "halved") == (0, 0)


def test_versions_are_part_of_the_key(tmp_path: Path, program: Path) -> None:
    cache = tmp_path / "cache"
    run(cache, program, "halved")
    newer_numba = "import numba; numba.__version__ += '+x'"
    newer_llvmlite = "import llvmlite; llvmlite.__version__ += '+x'"
    newer_sympy = (
        "from tileloom.runtime import versions; old = versions.version; "
        "versions.version = lambda name: old(name) + '+x' * (name == 'sympy')"
    )
    assert made_by(cache, program, "halved", first=newer_numba) == (0, 1)
    assert made_by(cache, program, "halved", first=newer_llvmlite) == (0, 1)
    assert made_by(cache, program, "halved", first=newer_sympy) == (1, 0)
    assert made_by(cache, program, "halved") == (0, 0)


def test_the_compilers_own_source_is_part_of_the_key(tmp_path: Path, program: Path) -> None:
    cache, sources = tmp_path / "cache", tmp_path / "src"
    shutil.copytree(SOURCES / "tileloom", sources / "tileloom", ignore=shutil.ignore_patterns("__pycache__"))
    for file in (sources / "tileloom").rglob("*.py"):
        os.utime(file, (0, 0))
    assert made_by(cache, program, "halved", sources=sources) == (1, 1)
    assert made_by(cache, program, "halved") == (0, 0)  # the same files in another place
    for edited, rebuilt in (
        ("compiler/passes/lower.py", (1, 0)),
        ("runtime/intrinsics/cpu.py", (0, 1)),
        ("cli/show.py", (0, 0)),
    ):
        file = sources / "tileloom" / edited
        file.write_text(file.read_text() + "# edited\n")
        os.utime(file, (0, 0))
        assert made_by(cache, program, "halved", sources=sources) == rebuilt, edited


def test_sources_edited_under_a_running_process_are_not_taken_for_its_own(
    tmp_path: Path, program: Path
) -> None:
    sources = tmp_path / "src"
    shutil.copytree(SOURCES / "tileloom", sources / "tileloom", ignore=shutil.ignore_patterns("__pycache__"))
    edit = f"import tileloom.runtime.cache, os; os.utime({str(sources / 'tileloom/compiler/region.py')!r})"
    cache = tmp_path / "cache"
    run(cache, program, "halved", sources=sources, first=edit)
    assert made_by(cache, program, "halved", sources=sources) == (1, 0)


# ---------------------------------------------------------------- several at once


def test_B080_processes_that_start_together_on_an_empty_folder(tmp_path: Path, slow: bool) -> None:
    for number in range(20 if slow else 1):
        cache = tmp_path / str(number)
        running = [
            start(cache, EXAMPLES / "softmax.tile", "row_softmax", typed=["T"], extents={"M": 5, "N": 9})
            for _ in range(8)
        ]
        found = [finish(p) for p in running]
        assert len({str(f["results"]) for f in found}) == 1
        assert sum(f["compiled"] for f in found) == 1  # the others waited for it
        litter = [p.name for p in cache.rglob("*") if p.is_file() and p.suffix != SUFFIX]
        assert litter == ["locks"]


def test_B083_threads_and_processes_that_call_first_at_once(tmp_path: Path, slow: bool) -> None:
    for number in range(20 if slow else 1):
        cache = tmp_path / str(number)
        running = [
            start(
                cache, EXAMPLES / "vector_add.tile", "vector_add", typed=["T"], threads=16, extents={"N": 9}
            )
            for _ in range(4)
        ]
        found = [finish(p) for p in running]
        assert {len(f["results"]) for f in found} == {16}
        assert len({str(r) for f in found for r in f["results"]}) == 1
        assert sum(f["compiled"] for f in found) == 1


def test_B100_every_kernel_runs_alike_from_the_cache(tmp_path: Path, slow: bool) -> None:
    files = sorted(EXAMPLES.glob("*.tile")) if slow else [EXAMPLES / "layernorm.tile"]
    for file in files:
        for name, item in tl.load(file).kernels.items():
            typed = [t.name.name for t in item.type_params if t.kind == "dtype"]
            first = run(tmp_path / "cache", file, name, typed=typed)
            second = run(tmp_path / "cache", file, name, typed=typed)
            assert second["compiled"] == 0
            assert second["results"] == first["results"], name


# ---------------------------------------------------------------- torn and foreign files

WRITER = """
import sys
from pathlib import Path
from tileloom.runtime.cache import Store
store = Store(Path(sys.argv[1]))
print("ready", flush=True)
n = 0
while True:
    store.put("group", bytes([n % 251]) * 3_000_000, f"e{n % 7}")
    n += 1
"""


def test_writers_killed_at_any_moment_leave_whole_entries(tmp_path: Path, slow: bool) -> None:
    random = np.random.default_rng(0)
    for _ in range(20 if slow else 3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(SOURCES)}, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(random.uniform(0, 0.1))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        store = Store(tmp_path)
        for name in store.names("group"):
            content = store.get("group", name)
            assert content is not None
            assert len(content) == 3_000_000
            assert len(set(content)) == 1
        store.put("other", b"")  # sweeps up behind the dead
        assert not list(tmp_path.rglob("*.tmp"))


def test_damaged_entries_are_made_again(tmp_path: Path) -> None:
    cache, file = tmp_path / "cache", EXAMPLES / "vector_add.tile"
    first = run(cache, file, "vector_add", typed=["T"])
    for path in cache.rglob(f"*{SUFFIX}"):
        path.write_bytes(path.read_bytes()[:-9])
    again = run(cache, file, "vector_add", typed=["T"])
    assert again == first
    for path in cache.rglob(f"*{SUFFIX}"):
        path.write_bytes(b"something else")
    assert run(cache, file, "vector_add", typed=["T"]) == first
    assert run(cache, file, "vector_add", typed=["T"])["compiled"] == 0


@pytest.mark.parametrize(
    "damage", [b"", b"tileloom cache 1\n", b"tileloom cache 0\n" + bytes(40), bytes(100)]
)
def test_foreign_files_are_no_entries(tmp_path: Path, damage: bytes) -> None:
    store = Store(tmp_path)
    store.put("group", b"content", "name")
    assert store.get("group", "name") == b"content"
    (tmp_path / "group" / f"name{SUFFIX}").write_bytes(damage)
    assert store.get("group", "name") is None
    store.put("group", b"content", "name")
    assert store.get("group", "name") == b"content"


# ---------------------------------------------------------------- trust and size


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_can_write_is_not_used(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    store = Store(folder)
    with pytest.warns(Unusable, match=rf"others can write to it \(mode {mode:o}\): chmod go-w"):
        store.put("group", b"content")
    assert store.get("group") is None
    assert not list(folder.iterdir())
    folder.chmod(0o755)
    assert refusal(folder) is None


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
def test_a_folder_that_others_can_replace_is_not_used(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    (open_to_all / "mine").mkdir(parents=True)
    open_to_all.chmod(0o777)
    assert "others can replace it" in (refusal(open_to_all / "mine") or "")
    open_to_all.chmod(0o1777)  # as /tmp is
    assert refusal(open_to_all / "mine") is None


def test_kernels_run_without_a_cache(tmp_path: Path, program: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    process = start(tmp_path / "cache", program, "halved")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0
    assert json.loads(out)["compiled"] == 1
    assert err.count("is not used, so kernels compile anew in each process: it is no folder") == 1


@pytest.mark.usefixtures("no_warnings")
def test_the_least_recently_used_entries_are_evicted(tmp_path: Path) -> None:
    store = Store(tmp_path, limit_bytes=10_000)
    for i in range(9):
        store.put("group", bytes(1000), str(i))
        os.utime(tmp_path / "group" / f"{i}{SUFFIX}", (i, i))
    store.get("group", "0")  # used now
    store.put("group", bytes(1000), "9")
    store.put("group", bytes(1000), "10")
    assert store.usage().total_bytes <= 10_000
    assert {"0", "9", "10"} <= set(store.names("group"))
    assert "1" not in store.names("group")


# ---------------------------------------------------------------- digests of the package's own files


def test_digests_of_files_are_kept_and_follow_their_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a file's size and time of writing stay: what changed last is another time of it."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "package" / "runtime" / "cache.py"))
    file = tmp_path / "package" / "compiler" / "deep" / "a.py"
    file.parent.mkdir(parents=True)

    def written(text: str) -> str:
        file.write_text(text)
        os.utime(file, (1e9, 1e9))
        cache.digest_of_files.cache_clear()
        return cache.digest_of_files("compiler/**/*.py")

    first = written("a = 1\n")
    assert len(list((tmp_path / "cache" / cache.FILES).iterdir())) == 1
    time.sleep(2 * cache.TICK_S)
    second = written("a = 2\n")
    time.sleep(2 * cache.TICK_S)
    assert second != first == written("a = 1\n")
    reads: list[Path] = []
    monkeypatch.setattr(Path, "read_bytes", lambda p, real=Path.read_bytes: reads.append(p) or real(p))
    cache.digest_of_files.cache_clear()
    assert cache.digest_of_files("compiler/**/*.py") == first
    assert file not in reads
    cache.digest_of_files.cache_clear()


def test_versions_are_those_that_are_installed() -> None:
    from importlib import metadata

    from tileloom.runtime.versions import version

    names = sorted({d.metadata["Name"] for d in metadata.distributions()})
    assert {"numpy", "lark"} <= {n.lower() for n in names}
    assert {n: version(n) for n in names} == {n: metadata.version(n) for n in names}
    assert version("no-such-package") == "none"


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    from tileloom.runtime import versions

    caches = versions.version, versions._installed
    for cached in caches:
        cached.cache_clear()
    yield versions
    for cached in caches:
        cached.cache_clear()


def test_versions_of_older_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: ModuleType
) -> None:
    (tmp_path / "old_one.egg-info").mkdir()
    (tmp_path / "old_one.egg-info/PKG-INFO").write_text(
        "Metadata-Version: 1.0\nName: old-one\nVersion: 3.5\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert versions.version("old-one") == "3.5"


def test_versions_in_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: ModuleType
) -> None:
    with ZipFile(tmp_path / "packages.zip", "w") as archive:
        archive.writestr(
            "packed-2.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: packed\nVersion: 2.1\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path / "packages.zip"))
    assert versions.version("packed") == "2.1"
