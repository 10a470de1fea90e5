"""The command line: what each command prints, its exit codes, and that no user error ends in a traceback."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tileloom.__main__ import COMMANDS, main
from tileloom.cli.failures import CommandError
from tileloom.cli.settings import parse_settings, points, single
from tileloom.dsl.types import DType

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ATTENTION = str(EXAMPLES / "attention.tile")
SOFTMAX = str(EXAMPLES / "softmax.tile")
ADD = str(EXAMPLES / "vector_add.tile")
SMALL = ["-D", "H=2", "-D", "G=1", "-D", "M=9", "-D", "N=12", "-D", "D=8", "-D", "E=8"]
WRONG = "kernel k(x: f32[N]) -> y: f32[N] {\n    y[i] = x[i] + z[i]\n}\n"


@pytest.fixture
def wrong(tmp_path: Path) -> str:
    path = tmp_path / "wrong.tile"
    path.write_text(WRONG)
    return str(path)


# ---------------------------------------------------------------- the frame


def test_help_is_quick_and_lists_the_commands() -> None:
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "tileloom", "--help"], capture_output=True, text=True, check=True
        )
        taken.append(time.perf_counter() - start)
    assert min(taken) < 1.0  # 0.05 s alone; other tests run beside this one
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


def test_help_imports_no_compiler() -> None:
    code = "import sys, tileloom.__main__ as m\ntry: m.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([n for n in ('numpy', 'numba', 'sympy', 'lark', 'rich') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"tileloom {command}" in capsys.readouterr().out


def test_no_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["chekc"], ["check"], ["show", ATTENTION, "--emit", "nothing"], ["run", "--what"]]
)
def test_words_that_are_no_command_line(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["check", "nowhere.tile"], 1, "cannot read 'nowhere.tile'"),
        (["run", ATTENTION, "-D", "H=5"], 1, "requires H % G == 0 (G = 2, H = 5)"),
        (["run", ATTENTION, "-D", "Q=5"], 2, "no extent, scalar or dtype parameter `Q`"),
        (["run", ATTENTION, "-D", "Scale=1"], 2, "did you mean `scale`?"),
        (["run", ATTENTION, "-D", "N=4:8:x2"], 2, "only `bench` sweeps"),
        (["run", ATTENTION, "-D", "N=-4"], 2, "an integer from 0 to 2^63 - 1"),
        (["run", ATTENTION, "-D", "N=99999999999999999999"], 2, "an integer from 0 to 2^63 - 1"),
        (["run", ATTENTION, "-D", "N=9999999999999999"], 1, "not enough memory for these sizes"),
        (["run", ATTENTION, "-D", "T=i32"], 2, "T can be f32, f64, f16, bf16"),
        (["run", ATTENTION, "-D", "T=f8"], 2, "`f8` is no element type; T can be f32, f64, f16, bf16"),
        (["bench", ATTENTION, "-D", "T=f8"], 2, "T can be f32, f64, f16, bf16"),
        (["run", ATTENTION, "-D", "scale=x"], 2, "`x` is neither a number nor an element type"),
        (["run", ATTENTION, "-D", "N"], 2, "-D N is no setting"),
        (["run", ATTENTION + ":other"], 2, "has no kernel `other`; it has: attention"),
        (["run", ATTENTION, "--target", "gpu"], 2, "no target is called 'gpu'"),
        (["run", ATTENTION, "--schedule", "nowhere"], 1, "no schedule of that name"),
        (["bench", ADD, "-D", "N=10", "--json", "/nowhere/x.json"], 2, "there is no folder /nowhere"),
        (["bench", ADD, "-D", "N=10", "--json", "/"], 2, "it is a folder"),
        (["run", ATTENTION, "--option", "x"], 2, "no option is called 'x'"),
        (["run", ATTENTION, "--inputs", "nowhere.npz"], 1, "cannot read nowhere.npz: No such file"),
        (["run", ATTENTION, "--source", "nowhere.py"], 1, "cannot read nowhere.py"),
        (["run", ATTENTION, "--source", "x.py", "--target", "interp"], 2, "does not go with --target interp"),
        (
            ["run", ATTENTION, "--check-indices", "--target", "cpu"],
            2,
            "only the target 'interp' checks indices",
        ),
        (["show", ATTENTION, "--after", "sleep"], 2, "there is no such pass"),
        (["show", ATTENTION, "--emit", "ptx", "--target", "cpu"], 2, "needs a CUDA target"),
        (["show", ATTENTION, "--emit", "tile", "--after", "all"], 2, "give one"),
        (["bench", ADD, "-D", "N=10", "--vs", "torch"], 2, "nothing called 'torch'"),
        (["bench", ADD, "-D", "N=10", "--target", "interp"], 2, "leave it out or give `cpu`"),
        (
            ["bench", ADD, "-D", "N=10", "--target", "cuda:sm_80"],
            2,
            "`cpu` (benchmarks/gpu.py measures on a GPU)",
        ),
        (["explain", ADD, "-D", "N=10", "--measure", "--target", "interp"], 2, "leave it out or give `cpu`"),
        (["bench", ADD, "-D", "N=10", "--vs", "nowhere.py:f"], 2, "cannot read nowhere.py"),
    ],
)
def test_refusals_are_sentences(
    words: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


def test_diagnostics_show_the_place(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("check", "run", "show", "explain", "bench"):
        assert main([command, wrong]) == 1
        error = capsys.readouterr().err
        assert "wrong.tile:2:19" in error
        assert "there is no tensor `z`" in error
        assert "\x1b" not in error  # no colours where the output is no terminal


def test_check_of_several_files(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", wrong, SOFTMAX]) == 1
    shown = capsys.readouterr()
    assert shown.out == f"{SOFTMAX}: ok, row_softmax\n"
    assert "wrong.tile:2:19" in shown.err


def test_diagnostics_as_json(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", wrong, "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["diagnostics"]
    assert found["code"] == "E0102"
    assert (found["where"]["line"], found["where"]["column"]) == (2, 19)


def test_file_of_several_kernels_needs_a_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "two.tile"
    text = "kernel {}(x: f32[N]) -> y: f32[N] {{\n    example N = 3\n    y[i] = {} * x[i]\n}}\n"
    path.write_text(text.format("double", 2) + text.format("triple", 3))
    assert main(["show", str(path)]) == 2
    assert f"{path}:double, {path}:triple" in capsys.readouterr().err
    assert main(["show", f"{path}:triple"]) == 0
    assert "3.0 * " in capsys.readouterr().out


def test_size_that_nobody_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bare.tile"
    path.write_text("kernel k(x: f32[N]) -> y: f32[N] {\n    y[i] = x[i]\n}\n")
    assert main(["run", str(path)]) == 2
    assert "add -D N=…" in capsys.readouterr().err


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Typed:
        buffer = io.BytesIO(Path(SOFTMAX).read_bytes())

    monkeypatch.setattr(sys, "stdin", Typed)
    assert main(["check", "-"]) == 0
    assert capsys.readouterr().out == "-: ok, row_softmax\n"


@pytest.mark.parametrize(
    "words",
    [["fmt", "-"], ["fmt", "FILE"], ["run", ADD, "--source", "FILE"], ["run", ADD, "--schedule", "FILE"]],
)
def test_bytes_that_are_no_text(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Typed:
        buffer = io.BytesIO(b"kernel\n\xff")

    monkeypatch.setattr(sys, "stdin", Typed)
    path = tmp_path / "bytes"
    path.write_bytes(b"kernel\n\xff")
    assert main([w.replace("FILE", str(path)) for w in words]) == 1
    assert "is not UTF-8: byte 0xFF on line 2" in capsys.readouterr().err


def test_no_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["run", "-"]) == 1
    assert "standard input is closed" in capsys.readouterr().err


def test_inputs_that_are_one_array_or_of_another_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, both = tmp_path / "one.npy", tmp_path / "both.npz"
    np.save(one, np.ones(4))
    np.savez(both, x=np.ones(5, np.float32), y=np.ones(5, np.float32))
    assert main(["run", ADD, "--inputs", str(one)]) == 1
    assert "is no .npz file" in capsys.readouterr().err
    assert main(["run", ADD, "--inputs", str(both), "-D", "N=7"]) == 2
    assert "-D N=7, but the arrays of --inputs make N = 5" in capsys.readouterr().err


def test_a_full_disk_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tileloom.cli.show.graph_of", full)
    assert main(["show", ATTENTION, "--emit", "tensor"]) == 1
    assert capsys.readouterr().err.endswith("error: No space left on device\n")


@pytest.mark.filterwarnings("error")
def test_infinities_are_compared_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", ATTENTION, "--target", "interp", "-D", "N=0", "-D", "M=3"]) == 0


def test_mistake_of_the_compiler_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise AssertionError("nobody expected this")

    monkeypatch.setattr("tileloom.cli.show.graph_of", broken)
    assert main(["show", ATTENTION, "--emit", "tensor"]) == 1
    error = capsys.readouterr().err
    assert "internal error: AssertionError: nobody expected this" in error
    assert "Traceback" not in error
    kept = Path(error.rsplit(": ", 1)[1].strip())
    assert "in broken" in kept.read_text()
    kept.unlink()


# ---------------------------------------------------------------- settings


def test_settings_sweep() -> None:
    settings = parse_settings(["N=512:4096:x2", "D=64,128", "s=0.5", "T=bf16"])
    found = list(points(settings))
    assert [(p["N"], p["D"]) for p in found] == [(n, d) for n in (512, 1024, 2048, 4096) for d in (64, 128)]
    assert all(p["s"] == 0.5 and p["T"] is DType.BF16 for p in found)


def test_settings_tie_names_and_add_steps() -> None:
    assert list(points(parse_settings(["M=N=64:200:+64"]))) == [{"M": n, "N": n} for n in (64, 128, 192)]


@pytest.mark.parametrize("text", ["N=8:4:x2", "N=0:4:x2", "N=1:4:x1", "=3", "N=", "1=2", "N=1:100000:+1"])
def test_settings_that_are_none(text: str) -> None:
    with pytest.raises(CommandError) as refused:
        single(parse_settings([text]))
    assert refused.value.code == 2


def test_name_set_twice() -> None:
    with pytest.raises(CommandError, match="sets `N` twice"):
        parse_settings(["N=1", "M=N=2"])


# ---------------------------------------------------------------- fmt


def test_fmt_rewrites_and_checks(tmp_path: Path) -> None:
    path = tmp_path / "loose.tile"
    path.write_text("kernel k(x:f32[N])->y:f32[N]{\ny[i]=x[i]   # kept\n}\n")
    assert main(["fmt", "--check", str(path)]) == 1
    assert main(["fmt", str(path)]) == 0
    assert "    y[i] = x[i]" in path.read_text()
    assert "# kept" in path.read_text()
    assert main(["fmt", "--check", str(path)]) == 0


# ---------------------------------------------------------------- show


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["show", ATTENTION, *words]) == 0
    return capsys.readouterr().out


def test_show_syntax(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--emit", "syntax")
    assert text.startswith("Kernel 4:1\n")
    assert "BracketCall" in text
    assert "name='softmax'" in text


def test_show_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    assert "lse[b, h, m]: f32 = " in shown(capsys, "--emit", "tensor")


def test_show_says_which_sizes_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", ATTENTION, "-D", "D=32"]) == 0
    printed = capsys.readouterr()
    assert "from the example: B = 1, H = 4, M = 500, G = 2" in printed.err
    assert "D = 32" not in printed.err
    assert "static D = 32, E = 64" in printed.out


def test_show_schedule_can_be_given_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.schedule"
    path.write_text(shown(capsys, "--emit", "schedule").replace("n by 128", "n by 32"))
    text = shown(capsys, "--emit", "tile", "--schedule", str(path))
    assert "for n in N by 32" in text
    assert "for n in N by 128" not in text


def test_schedule_for_an_axis_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.schedule"
    path.write_text(shown(capsys, "--emit", "schedule").replace("n by 128", "w by 32"))
    assert main(["show", ATTENTION, "--schedule", str(path)]) == 1
    assert "`w` is no axis of `attention`" in capsys.readouterr().err


def test_schedule_against_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.schedule"
    path.write_text(shown(capsys, "--emit", "schedule"))
    assert main(["show", ATTENTION, "--schedule", str(path), "--fuse", "none"]) == 2
    assert "says `fuse all`" in capsys.readouterr().err


def test_show_source_is_python(capsys: pytest.CaptureFixture[str]) -> None:
    compile(shown(capsys, "--emit", "source"), "generated", "exec")


def test_show_after_all_names_each_pass(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--after", "all")
    passes = re.findall(r"^# after (\w+)$", text, re.MULTILINE)
    assert passes == ["tensor", "canonicalize", "fuse", "schedule", "tile", "source"]
    assert shown(capsys, "--after", "tile") in text


def test_show_fuse_none_stores_every_statement(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--fuse", "none")
    assert re.search(r"scratch s: (out )?f32\[B, H, M, N\]", text)
    assert "scratch" not in shown(capsys)


@pytest.mark.parametrize(("emit", "says"), [("ptx", ".target sm_80"), ("resources", "registers")])
def test_show_machine_code(emit: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba_cuda")
    assert main(["show", ADD, "--emit", emit, "--target", "cuda:sm_80"]) == 0
    shown = capsys.readouterr()
    assert says in shown.out
    assert "no --target" not in shown.err


def test_show_machine_code_says_which_target_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("numba_cuda")
    assert main(["show", ATTENTION, "--emit", "resources"]) == 0
    shown = capsys.readouterr()
    assert "no --target is given: for cuda:sm_90a" in shown.err
    words = " ".join(shown.out.split())
    assert "a call launches attention_parts, then attention" in words
    assert "else `attention_any` for any sizes, strides and alignment" in words


# ---------------------------------------------------------------- run


def test_run_compares_with_float64(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", ADD, "-D", "N=1000", "--verify-each"]) == 0
    text = capsys.readouterr().out
    for stage in ("after elaborate", "after canonicalize", "after lower", "cpu"):
        assert re.search(rf"^{re.escape(stage)} +z +f32 .* ok", text, re.MULTILINE)
    assert text.endswith("\nok\n")


def test_run_attention_on_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", ATTENTION, "--target", "interp", *SMALL]) == 0
    assert "lse" in capsys.readouterr().out


def test_run_edited_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", ADD, "-D", "N=100", "--emit", "source"]) == 0
    source = capsys.readouterr().out
    edited = tmp_path / "edited.py"
    edited.write_text(source)
    assert main(["run", ADD, "-D", "N=100", "--source", str(edited)]) == 0
    assert source.count(" + load_some_wide(y") == 1
    edited.write_text(source.replace(" + load_some_wide(y", " - load_some_wide(y"))
    assert main(["run", ADD, "-D", "N=100", "--source", str(edited)]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["def other(): pass\n", "import nothing_of_that_name\n", "def (\n"])
def test_run_broken_source(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(text)
    assert main(["run", ADD, "-D", "N=100", "--source", str(broken)]) == 1
    assert "broken.py" in capsys.readouterr().err


def test_run_given_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "inputs.npz"
    x = np.arange(7, dtype=np.float64)
    np.savez(path, x=x, y=x)
    assert main(["run", ADD, "--target", "interp", "--inputs", str(path)]) == 0
    assert "N = 7, T = f64" in capsys.readouterr().out
    np.savez(path, x=x)
    assert main(["run", ADD, "--target", "interp", "--inputs", str(path)]) == 1
    assert "has no `y`" in capsys.readouterr().err
    np.savez(path, x=x, y=x[:3])
    assert main(["run", ADD, "--target", "interp", "--inputs", str(path)]) == 1
    assert "is 7" in capsys.readouterr().err


def test_run_says_when_it_does_not_compare(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tileloom.cli.run.SMALL", 10)
    assert main(["run", ADD, "--target", "interp", "-D", "N=11"]) == 0
    assert "not compared" in capsys.readouterr().out
    assert main(["run", ADD, "--target", "interp", "-D", "N=11", "--check"]) == 0
    assert "largest error" in capsys.readouterr().out


# ---------------------------------------------------------------- explain and bench


def test_explain_in_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", ATTENTION]) == 0
    text = capsys.readouterr().out
    for title in ("What was derived", "What is stored", "Memory beyond", "Schedule", "Remarks"):
        assert title in text


@pytest.mark.parametrize(
    ("flag", "says", "not_said"),
    [
        ("--derive", "which is right because", "What is stored"),
        ("--fusion", "groupings were lowered", "which is right because"),
        ("--memory", "predicted bytes", "What is stored"),
    ],
)
def test_explain_one_section(flag: str, says: str, not_said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", ATTENTION, flag]) == 0
    text = capsys.readouterr().out
    assert says in text
    assert not_said not in text


def test_explain_json_has_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", ATTENTION, "--json", "-D", "N=64"]) == 0
    facts = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert facts["kernel"] == "attention"
    assert facts["sizes"]["N"] == 64
    assert [o["status"] for p in facts["passes"] for s in p["states"] for o in s["obligations"]] == [
        "proved"
    ] * 8
    assert [c["decision"] for c in facts["fusion"]["candidates"]] == ["fused", "fused"]


def test_explain_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", ADD, "-D", "N=1000", "--memory", "--measure"]) == 0
    assert "measured on this machine" in capsys.readouterr().out


def test_bench_refuses_a_name_before_it_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 99.0, 99.0), raising=False)
    assert main(["bench", ADD, "-D", "N=10", "--vs", "triton"]) == 2
    error = capsys.readouterr().err
    assert "nothing called 'triton'" in error
    assert "do not trust these times" not in error


def test_bench_records_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rival = tmp_path / "rival.py"
    rival.write_text("def add(x, y):\n    return x + y\n")
    record = tmp_path / "record.json"
    words = ["bench", ADD, "-D", "N=500:1000:x2", "--vs", f"naive,numpy,{rival}:add", "--json", str(record)]
    assert main(words) == 0
    assert "median ms" in capsys.readouterr().out
    found = json.loads(record.read_text())
    assert found["schema_version"] == 1
    assert found["kernel"] == "vector_add"
    assert {"commit", "command", "versions", "device", "conditions"} <= found.keys()
    rows = [(r["sizes"]["N"], r["variant"]) for r in found["rows"]]
    assert rows == [(n, v) for n in (500, 1000) for v in ("compiled", "naive", "numpy", "add")]
    for r in found["rows"]:
        assert r["p20_ms"] <= r["median_ms"] <= r["p80_ms"]
        assert len(r["samples_ms"]) >= 5
        assert r["error"] < 1e-6
        assert r["checked_at"] == r["sizes"]
    assert found["rows"][0]["prediction"]["binds"]


def test_bench_times_nothing_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rival = tmp_path / "rival.py"
    rival.write_text("def add(x, y):\n    return x - y\n")
    assert main(["bench", ADD, "-D", "N=500", "--vs", f"{rival}:add"]) == 1
    printed = capsys.readouterr()
    assert "add errs by" in printed.err
    assert "median ms" not in printed.out
