"""Files: imports, the prelude, encodings, and names that clash."""

from __future__ import annotations

from pathlib import Path

import pytest

from tileloom.dsl.diagnostics import Diagnostic, TileError
from tileloom.dsl.load import load, parse

KERNEL = "kernel {0}(x: f32[N]) -> o: f32[N] {{\n    o[n] = {1}(x[n])\n}}\n"


def write(folder: Path, **files: str) -> Path:
    """Write `name.tile` files and return the path of the first."""
    for name, text in files.items():
        (folder / f"{name}.tile").write_text(text, encoding="utf-8")
    return folder / f"{next(iter(files))}.tile"


def errors(path: Path) -> list[Diagnostic]:
    with pytest.raises(TileError) as caught:
        load(path)
    return caught.value.diagnostics


def test_prelude_is_always_there() -> None:
    wanted = {"softmax", "softmax_sink", "logsumexp", "mean", "var", "rmsnorm", "layernorm"}
    wanted |= {"gelu", "silu", "sigmoid", "softcap"}
    assert wanted <= set(parse("").fns)


def test_imports_come_first_and_once(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    write(
        tmp_path / "lib",
        base="fn twice(x) = 2 * x\n",
        mid='import "base.tile"\nfn four(x) = twice(twice(x))\n',
    )
    main = write(
        tmp_path, main='import "lib/mid.tile"\nimport "lib/base.tile"\n' + KERNEL.format("k", "four")
    )
    program = load(main)
    assert list(program.fns)[-2:] == ["twice", "four"]
    assert [Path(source.name).name for source in program.sources] == [
        "prelude.tile",
        "base.tile",
        "mid.tile",
        "main.tile",
    ]


def test_a_file_that_imports_itself(tmp_path: Path) -> None:
    (found,) = errors(write(tmp_path, a='import "a.tile"\n'))
    assert (found.code, found.message) == ("E0062", "'a.tile' imports itself")


def test_a_circle_of_imports_is_named(tmp_path: Path) -> None:
    main = write(
        tmp_path, a='import "b.tile"\n', b='\nimport "c.tile"\n', c=f'import "../{tmp_path.name}/a.tile"\n'
    )
    (found,) = errors(main)
    assert (found.code, found.note) == ("E0062", "a.tile → b.tile → c.tile → a.tile")


def test_a_thousand_imports_in_a_row(tmp_path: Path) -> None:
    files = {f"f{i}": f'import "f{i + 1}.tile"\n' for i in range(1000)}
    assert "last" in load(write(tmp_path, **files, f1000="fn last(x) = x\n")).fns


def test_missing_files_are_all_reported(tmp_path: Path) -> None:
    found = errors(write(tmp_path, a='import "b.tile"\nimport "c.tile"\nimport "."\n'))
    assert [(d.code, d.span.line if d.span else 0) for d in found] == [
        ("E0061", 1),
        ("E0061", 2),
        ("E0061", 3),
    ]
    (missing,) = errors(tmp_path / "none.tile")
    assert missing.code == "E0061"
    assert "none.tile" in missing.message


def test_clash_names_both_places(tmp_path: Path) -> None:
    main = write(tmp_path, a='import "b.tile"\n\nfn f(x) = x\n', b="# first\nfn f(x) = x\n")
    (found,) = errors(main)
    assert found.code == "E0063"
    assert found.note is not None
    assert f"{tmp_path / 'b.tile'}:2:4" in found.note
    assert f"{main}:3:4" in found.note


def test_errors_point_into_the_imported_file(tmp_path: Path) -> None:
    (found,) = errors(write(tmp_path, a='import "b.tile"\n', b="fn f(x) = y\n"))
    assert found.span is not None
    assert (Path(found.span.source.name).name, found.span.line, found.span.column) == ("b.tile", 1, 11)


def test_a_kernel_may_be_called_like_a_fn() -> None:
    program = parse(KERNEL.format("silu", "silu"))
    assert program["silu"].kernel.name.name == "silu"
    with pytest.raises(KeyError, match="this program has: silu"):
        program["sulu"]


def test_bom_crlf_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.tile"
    path.write_bytes(b"\xef\xbb\xbf" + KERNEL.format("k", "exp").replace("\n", "\r\n").encode())
    assert load(path)["k"].kernel == parse(KERNEL.format("k", "exp"))["k"].kernel
    path.write_bytes(b"# caf\xc3\xa9\n# caf\xe9\n")
    (found,) = errors(path)
    assert (found.code, "0xE9 on line 2" in found.message) == ("E0011", True)
    path.write_bytes(b"fn f(x) = x\0\n")
    (found,) = errors(path)
    assert (found.code, "NUL" in found.message) == ("E0001", True)


def test_a_python_file_is_called_one(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text('"""Says what it is."""\nimport math\n')
    (found,) = errors(path)
    assert (found.code, found.help) == ("E0064", None)
    assert "is Python" in found.message
    (tmp_path / "a.tile").write_text(KERNEL.format("k", "exp"))
    (found,) = errors(path)
    assert found.help == f"did you mean `{tmp_path / 'a.tile'}`?"


def test_a_huge_file_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "a.tile"
    with path.open("wb") as file:
        file.truncate(100_000_000)
    (found,) = errors(path)
    assert (found.code, "100000000" in found.message) == ("E0008", True)


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent / "cases" / "accepted").glob("*.tile")), ids=lambda p: p.stem
)
def test_programs_of_the_field_are_accepted(path: Path) -> None:
    """The checks refuse nothing that belongs to the language (issue 3's list of programs)."""
    assert load(path).kernels


def test_names_that_can_be_no_file(tmp_path: Path) -> None:
    (tmp_path / "loop.tile").symlink_to(tmp_path / "loop.tile")
    for name in ("loop.tile", "a" * 5000, "", "no/such/folder.tile"):
        (found,) = errors(write(tmp_path, a=f'import "{name}"\n'))
        assert found.code == "E0061"
    assert "f" in parse("fn f(x) = x", name="a\0b").fns
