"""The command line as a whole: help, what it imports and keeps, bad commands, pipes."""

import os
import subprocess
import sys
import time
import types

import pytest

import roughflow as rf
from roughflow.cli import main, startup
from roughflow.cli.startup import cache_folder, keep_programs
from roughflow.train import progress_bar


def test_help_is_a_tour(capsys):
    assert main(["--help"]) == 0
    tour = capsys.readouterr().out
    places = [
        tour.index(f"\n  {name} ")
        for name in ("demo", "fit", "score", "sample", "impute", "tune", "estimate", "reproduce")
    ]
    assert places == sorted(places)
    assert tour.count("roughflow fit ") == 1


@pytest.mark.parametrize(
    "command", ["demo", "fit", "score", "sample", "impute", "tune", "estimate", "reproduce"]
)
def test_each_command_has_help_with_an_example(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"example: roughflow {command} " in " ".join(capsys.readouterr().out.split())


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("roughflow ")


def test_options_are_read_before_anything_heavy_is_imported():
    code = (
        "import sys; from roughflow.cli import main; "
        "assert main(['--version']) == 0 and main(['fit', '--help']) == 0 and main(['fitt']) == 2; "
        "print([name for name in ('jax', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_compiled_programs_are_kept_in_the_users_cache(tmp_path, monkeypatch):
    """Small ones too; those made a month ago go, and the oldest of too many. A folder of the user's own
    choice is left alone."""
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    keep_programs()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "mine"
    assert os.listdir(tmp_path) == []
    folder = cache_folder()
    assert folder.parent == tmp_path / "roughflow" / "programs"
    folder.mkdir(parents=True)
    for name, age in (("new", 0), ("large", 60), ("next", 120), ("old", 1e9)):
        (folder / name).write_bytes(bytes(600_000 if name == "large" else 10))
        os.utime(folder / name, (time.time() - age,) * 2)
    monkeypatch.setattr(startup, "CACHE_MEGABYTES", 0.6)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    keep_programs()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    assert os.listdir(folder) == ["new"]
    # On a processor that knows other instructions they would not run.
    monkeypatch.setattr(startup, "_processor", lambda: "another")
    assert cache_folder() != folder


def test_interrupted_while_it_starts():
    """JAX might lose the exception: the program ends at once, in one line."""
    code = (
        "import os, signal; from roughflow.cli.startup import starting\n"
        "with starting(): os.kill(os.getpid(), signal.SIGINT); print('on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "roughflow: interrupted\n")


def test_standard_output_that_is_closed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--version"]) == 2
    assert "standard output is closed" in capsys.readouterr().err


def test_a_log_has_few_lines(capsys):
    with progress_bar(1000, name="regression") as bar:
        assert capsys.readouterr().err == "regression: compiling …\n"
        for _ in range(700):
            bar.update(1)
            bar.set_postfix_str("loss 1")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert lines[0] == "regression: step 125 of 1000 after 0 s, loss 1"
    assert lines[-1] == "regression: step 700 of 1000 after 0 s"


def test_experiments_are_called_with_the_options(tmp_path, monkeypatch, capsys):
    calls = []
    module = types.ModuleType("roughflow.experiments")
    module.run = lambda *a, **k: calls.append((a, k)) or {"excess": 0.25, "part": {"n": 3}}
    module.demo = lambda *a, **k: calls.append((a, k)) or {"loss": 1.5}
    monkeypatch.setitem(sys.modules, "roughflow.experiments", module)
    monkeypatch.setattr(rf, "experiments", module, raising=False)
    out = tmp_path / "figures"
    assert main(["demo", "--out", str(out), "--seed", "7", "--quiet"]) == 0
    assert calls.pop() == ((out,), {"seed": 7, "progress": False})
    assert main(["reproduce", "all", "--out", str(out), "--steps", "9", "--resume"]) == 0
    assert [positional for positional, _ in calls] == [
        (name, out) for name in ("fig1", "fig2", "fig3", "fig4")
    ]
    assert calls[0][1] == {"steps": 9, "seed": 0, "progress": True, "resume": True}
    assert "0.2500" in capsys.readouterr().out


def test_as_a_program_in_a_pipe(fitted):
    """`python -m roughflow.cli`, whose reader stops reading: no traceback."""
    command = [sys.executable, "-m", "roughflow.cli", "sample", str(fitted / "model.rf"), "-n", "20000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        assert program.stdout.readline() == "c,a\n"
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 141
