"""Texts and files to programs: reads files, follows imports, adds the prelude, refuses clashing names, checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from functools import cache
from pathlib import Path

from . import syntax as s
from .check import check
from .diagnostics import Diagnostic, Diagnostics, TileError, refuse
from .records import dataclass
from .source import MAX_FILE_CHARACTERS, Source, Span
from .trees import tree

PRELUDE = "prelude.tile"


def parse(text: str, name: str = "<text>") -> s.Program:
    """The program of a text. Its imports are relative to the folder of `name`, the current one for `<text>` and `-`.

    Raises `TileError` with every error found.
    """
    return _program(Source(name, text.removeprefix("\ufeff")))


def load(path: str | Path) -> s.Program:
    """The program of a `.tile` file and everything it imports. Raises `TileError`, also where no file can be read."""
    return _program(_read(Path(path), None))


def _program(source: Source) -> s.Program:
    found = Diagnostics()
    files = _Files(found)
    files.follow(source)
    found.check()
    program = _merge(files.in_order, found)
    found.check()
    return check(program)


@cache
def _prelude() -> s.File:
    path = Path(__file__).parent / PRELUDE
    return tree(Source(PRELUDE, path.read_text(encoding="utf-8")))


# ---------------------------------------------------------------- files


def _read(path: Path, wanted_by: Span | None) -> Source:
    try:
        if path.stat().st_size > 4 * MAX_FILE_CHARACTERS:
            raise refuse(
                "E0008",
                f"{path} has {path.stat().st_size} bytes; at most {MAX_FILE_CHARACTERS} characters are accepted",
                wanted_by,
            )
        data = path.read_bytes()
    except (OSError, ValueError) as reason:  # ValueError: a NUL in the name
        why = getattr(reason, "strerror", None) or str(reason)
        raise refuse(
            "E0061",
            f"cannot read {str(path)!r}: {why}",
            wanted_by,
            help="an import is relative to the folder of the file that holds it" if wanted_by else None,
        ) from None
    if path.suffix == ".py":
        beside = path.with_suffix(".tile")
        help = f"did you mean `{beside}`?" if beside.exists() else None
        raise refuse("E0064", f"{path} is Python; kernels stand in files called .tile", wanted_by, help=help)
    try:
        return Source(str(path), data.decode("utf-8-sig"))
    except UnicodeDecodeError as reason:
        line = data.count(b"\n", 0, reason.start) + 1
        raise refuse(
            "E0011",
            f"{path} is not UTF-8: byte 0x{data[reason.start]:02X} on line {line}",
            wanted_by,
            help="save the file as UTF-8",
        ) from None


@dataclass
class _Files:
    """The files of a program, each once, imports before importers."""

    found: Diagnostics
    in_order: list[s.File] = field(default_factory=list)
    done: set[Path] = field(default_factory=set)

    def follow(self, source: Source) -> None:
        """Depth first with a stack of its own: a long chain of imports meets no recursion limit."""
        self.in_order.append(_prelude())
        stack: list[tuple[Path, s.File, Iterator[s.Import]]] = []
        self._open(stack, source)
        while stack:
            path, file, imports = stack[-1]
            wanted = next(imports, None)
            if wanted is None:
                stack.pop()
                self.done.add(path)
                self.in_order.append(file)
                continue
            self._import(stack, wanted)

    def _import(self, stack: list[tuple[Path, s.File, Iterator[s.Import]]], wanted: s.Import) -> None:
        path = Path(wanted.span.source.name).parent / wanted.path
        key = _identity(path)
        chain = [at for at, _, _ in stack]
        if key in chain:
            names = [at.name for at in chain[chain.index(key) :]]
            self.found.error(
                "E0062",
                f"{wanted.path!r} imports itself"
                if len(names) == 1
                else f"{wanted.path!r} is imported in a circle",
                wanted.span,
                note=" → ".join([*names, names[0]]),
                help="move what both need into a third file",
            )
        elif key not in self.done:
            try:
                self._open(stack, _read(path, wanted.span))
            except TileError as reason:
                self.done.add(key)
                self.found.add(*reason.diagnostics)

    def _open(self, stack: list[tuple[Path, s.File, Iterator[s.Import]]], source: Source) -> None:
        file = tree(source)
        imports = (item for item in file.items if isinstance(item, s.Import))
        stack.append((_identity(Path(source.name)), file, imports))


def _identity(path: Path) -> Path:
    """The same for every way to name one file; the path itself if it cannot name any (`_read` then says why)."""
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError):  # a loop of links, a NUL in the name
        return path


# ---------------------------------------------------------------- names across files


def _merge(files: list[s.File], found: Diagnostics) -> s.Program:
    program = s.Program(files[-1], sources=tuple(f.source for f in files))
    seen: dict[tuple[str, str], s.Name] = {}
    for item in (item for file in files for item in file.items):
        if isinstance(item, s.Import):
            continue
        kind = "fn" if isinstance(item, s.Fn) else "schedule" if _is_schedule(item) else "kernel"
        first = seen.setdefault((kind, item.name.name), item.name)
        if first is not item.name:
            found.add(_clash(kind, item.name, first))
        match item:
            case s.Fn():
                program.fns[item.name.name] = item
            case s.Kernel():
                program.kernels[item.name.name] = item
            case s.Grad():
                program.grads[item.name.name] = item
            case s.Verbatim():
                (program.schedules if _is_schedule(item) else program.tiles)[item.name.name] = item
    return program


def _is_schedule(item: s.Item) -> bool:
    return isinstance(item, s.Verbatim) and item.kind == "schedule"


def _clash(kind: str, name: s.Name, first: s.Name) -> Diagnostic:
    where = (
        "in the prelude, which is always there" if first.span.source.name == PRELUDE else f"at {first.span}"
    )
    return Diagnostic(
        "E0063",
        f"the name of this {kind}, `{name.name}`, is taken",
        name.span,
        note=f"it is first defined {where}; this one is at {name.span}",
        help="rename one of them",
    )
