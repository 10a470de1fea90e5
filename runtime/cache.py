"""A folder of what was compiled, shared by processes: texts of compilations and machine code, one entry a file.

An entry is found by a key that digests everything it depends on, so nothing is ever invalidated: a changed input is another
key, and what nobody reads any more is evicted. Entries appear whole (written beside, then renamed) and carry a digest of
their content: a torn, truncated or foreign file is no entry. Machine code is loaded from here, so a folder into which other
users can write is not used.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field
from functools import cache
from glob import glob
from pathlib import Path
from typing import IO

from ..dsl.records import dataclass
from .forks import ForkedLock

try:
    import fcntl
except ImportError:  # no POSIX: processes do not wait for each other, each writes the same entry
    fcntl = None  # type: ignore[assignment]

VARIABLE = "TILELOOM_CACHE_DIR"
LIMIT_BYTES = 1 << 30
KEPT = 0.8
"""Share of the limit that eviction leaves."""
MAGIC = b"tileloom cache 1\n"
SUFFIX = ".entry"
LOCKS = "locks"
FILES = "files"
"""The group of digests of files."""
STARTED_S = time.time()
TICK_S = 0.02
"""File times lag behind the clock by up to one tick of the system, 1 to 10 ms."""
ABANDONED_S = 3600.0
"""A file half written for so long has no writer."""
WAIT_S = 300.0
"""Longest wait for another process that makes the same entry; then this one makes it too."""


class Unusable(Warning):
    """The cache folder is not used; the message says why. Everything works without it, and compiles anew each time."""


@dataclass(frozen=True)
class Usage:
    """What a folder holds, in files and bytes."""

    entries: int
    total_bytes: int


def default_folder() -> Path:
    """`TILELOOM_CACHE_DIR`, or `tileloom` in the user's cache folder."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user) / "tileloom"


def digest(*parts: str | bytes) -> str:
    """SHA-256 of the parts, which cannot run into each other, in 40 hexadecimal digits."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return found.hexdigest()[:40]


@cache
def digest_of_files(*patterns: str) -> str:
    """Digest of this package's own files, `compiler/**/*.py` for one: names and contents.

    Files written since this process began may not be those that it imported: then the digest is this process's own. To read
    them all takes 10 ms, so their digest is kept too, for files that are the same by size, times and number in the file
    system: no content changes without the time of a file's last change (st_ctime).
    """
    root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    names = sorted(n for p in patterns for n in glob(p, root_dir=root, recursive=True))
    facts = [os.stat(os.path.join(root, n)) for n in names]
    if any(f.st_mtime > STARTED_S - TICK_S for f in facts):
        return _digest_of(secrets.token_hex(8), root, names)
    told = (f"{f.st_size} {f.st_mtime_ns} {f.st_ctime_ns} {f.st_ino} {f.st_dev}" for f in facts)
    folder, known = store(), digest(root, *names, *told)
    kept = folder.get(FILES, known)
    if kept is None:
        kept = _digest_of("", root, names).encode()
        folder.put(FILES, kept, known)
    return kept.decode()


def _digest_of(own: str, root: str, names: Sequence[str]) -> str:
    contents = (Path(root, n).read_bytes() for n in names)
    return digest(own, *(part for pair in zip(names, contents, strict=True) for part in pair))


@dataclass
class Store:
    """The entries of one folder, which need not exist yet. Every method may be called from any thread and process.

    Failures of the file system never reach the caller: what cannot be read is absent, what cannot be written is warned
    of once and not kept.
    """

    folder: Path
    limit_bytes: int = LIMIT_BYTES
    _locks: dict[str, ForkedLock] = field(default_factory=dict, repr=False)
    _guard: ForkedLock = field(default_factory=ForkedLock, repr=False)
    _lock_file: IO[bytes] | None = field(default=None, repr=False)
    _refused: str | None = field(default=None, repr=False)

    # -- entries

    def get(self, group: str, name: str = "") -> bytes | None:
        """The content of an entry, None where there is none."""
        if not self._usable():
            return None
        path = self._path(group, name)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        content = _opened(data)
        if content is None:
            _remove(path)
            return None
        with suppress(OSError):
            os.utime(path)  # the time of last use, which eviction goes by
        return content

    def put(self, group: str, content: bytes, name: str = "") -> None:
        """Make an entry, or replace it by one that is as good."""
        if not self._usable(create=True):
            return
        path = self._path(group, name)
        beside = path.with_name(f".{os.getpid()}-{secrets.token_hex(8)}.tmp")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                beside.write_bytes(_sealed(content))
                os.replace(beside, path)
            finally:
                beside.unlink(missing_ok=True)
        except OSError as reason:
            self._refuse(f"cannot write there: {reason.strerror or reason}")
        self._tidy()

    def names(self, group: str) -> list[str]:
        """Names of the entries of a group."""
        if not self._usable():
            return []
        try:
            found = os.listdir(self._path(group, "").parent)
        except OSError:
            return []
        return sorted(n.removesuffix(SUFFIX) for n in found if n.endswith(SUFFIX))

    def usage(self) -> Usage:
        found = list(self._entries())
        return Usage(len(found), sum(size for _, size, _ in found))

    def problem(self) -> str | None:
        """Why the folder is not used; None where it is, or will be once there is something to write."""
        return self._refused or refusal(self.folder)

    def _path(self, group: str, name: str) -> Path:
        return self.folder / group / f"{name}{SUFFIX}"

    # -- trust

    def _usable(self, create: bool = False) -> bool:
        if self._refused is not None:
            return False
        reason = refusal(self.folder)
        if reason is None and create and not self.folder.is_dir():
            try:
                self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as failure:
                reason = f"cannot make it: {failure.strerror or failure}"
            else:
                reason = refusal(self.folder)
        if reason is not None:
            self._refuse(reason)
        return reason is None

    def _refuse(self, reason: str) -> None:
        self._refused = reason
        message = (
            f"the cache folder {self.folder} is not used, so kernels compile anew in each process: {reason}"
        )
        warnings.warn(message, Unusable, stacklevel=2)

    # -- one maker an entry

    @contextmanager
    def making(self, group: str) -> Iterator[None]:
        """Hold this while making entries of a group: other threads wait, and processes where the system can lock files.
        A process that dies, however it dies, lets go."""
        with self._guard:
            lock = self._locks.setdefault(group, ForkedLock())
        with lock:
            place = int(digest(group)[:7], 16)
            held = self._hold(place)
            try:
                yield
            finally:
                if held is not None:
                    _byte_lock(held, fcntl.LOCK_UN, place)

    def _hold(self, place: int) -> IO[bytes] | None:
        """One byte of the lock file, locked; None where that is impossible or takes too long."""
        file = self._opened_lock_file() if fcntl is not None else None
        until = time.monotonic() + WAIT_S
        pause = 1e-3
        while file is not None:
            try:
                _byte_lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB, place)
                return file
            except BlockingIOError:
                if time.monotonic() > until:
                    return None
                time.sleep(pause)
                pause = min(2 * pause, 0.05)
            except OSError:  # file systems without locks
                return None
        return None

    def _opened_lock_file(self) -> IO[bytes] | None:
        """Opened once a process, since closing any handle to it would drop every lock that the process holds on it."""
        with self._guard:
            if self._lock_file is None and self._usable(create=True):
                with suppress(OSError):
                    self._lock_file = open(self.folder / LOCKS, "ab")  # noqa: SIM115
            return self._lock_file

    # -- size

    def _tidy(self) -> None:
        """Remove what dead writers left and, beyond the limit, the entries whose last use lies farthest back."""
        for path in self._listed(lambda n: n.endswith(".tmp")):
            if _abandoned(path):
                _remove(path)
        found = sorted(self._entries())
        total = sum(size for _, size, _ in found)
        if total <= self.limit_bytes:
            return
        for _, size, path in found:
            if total <= KEPT * self.limit_bytes:
                return
            _remove(path)
            total -= size

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Time of last use, bytes and path of each entry."""
        for path in self._listed(lambda n: n.endswith(SUFFIX)):
            with suppress(OSError):
                facts = path.stat()
                yield facts.st_mtime, facts.st_size, path

    def _listed(self, wanted: Callable[[str], bool]) -> Iterator[Path]:
        with suppress(OSError):
            for group in os.scandir(self.folder):
                if group.is_dir(follow_symlinks=False):
                    with suppress(OSError):
                        yield from (Path(f.path) for f in os.scandir(group) if wanted(f.name))


@cache
def store_of(folder: Path, limit_bytes: int = LIMIT_BYTES) -> Store:
    """The one store of this process for a folder."""
    return Store(folder, limit_bytes)


def store() -> Store:
    """The store that `TILELOOM_CACHE_DIR` names now."""
    return store_of(default_folder())


def refusal(folder: Path) -> str | None:
    """Why nothing may be read from or written to a folder; None where it may, or where it does not exist.

    Who can write there can make this user run any code. Sticky folders such as /tmp let nobody replace another's files.
    """
    if not hasattr(os, "geteuid"):
        return None
    try:
        whole = folder.resolve()
        facts = whole.stat()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as reason:
        return f"cannot read it: {getattr(reason, 'strerror', None) or reason}"
    if not stat.S_ISDIR(facts.st_mode):
        return "it is no folder"
    if facts.st_uid != os.geteuid():
        return (
            f"it belongs to user {facts.st_uid}, not to you (user {os.geteuid()}); name another in {VARIABLE}"
        )
    if facts.st_mode & 0o022:
        return f"others can write to it (mode {stat.S_IMODE(facts.st_mode):o}): chmod go-w {whole}"
    for parent in whole.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"others can replace it, since they can write to {parent} (mode {stat.S_IMODE(mode):o})"
    return None


# ---------------------------------------------------------------- files


def _sealed(content: bytes) -> bytes:
    return MAGIC + hashlib.sha256(content).digest() + content


def _opened(data: bytes) -> bytes | None:
    """The content of a file's bytes; None unless they are exactly what `_sealed` made."""
    head = len(MAGIC) + 32
    content = data[head:]
    whole = data.startswith(MAGIC) and data[len(MAGIC) : head] == hashlib.sha256(content).digest()
    return content if whole else None


def _byte_lock(file: IO[bytes], how: int, place: int) -> None:
    fcntl.lockf(file, how, 1, place)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _abandoned(path: Path) -> bool:
    """Is the writer of a half-written file dead? Its process number is in the name."""
    try:
        old = time.time() - path.stat().st_mtime > ABANDONED_S
        os.kill(int(path.name.removeprefix(".").partition("-")[0]), 0)
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return old
