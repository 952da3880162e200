"""The command line: what it prints, what it writes, and what it says when something is wrong."""

import contextlib
import csv
import gzip
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf
from roughflow.cli import main, start
from roughflow.cli.start import cache_folder, keep_programs
from roughflow.learn import progress_bar

TINY = ["--steps", "2", "--likelihood-steps", "2", "--width", "4", "--depth", "1", "--quiet"]


def write(path, header, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def table(path, rows=200, columns=("a", "b"), seed=0):
    """As many rows as `fitted` has, unless asked for others: one program fits them all."""
    return write(path, columns, np.random.default_rng(seed).normal(3, 2, (rows, len(columns))))


def read(path):
    with open(path, newline="") as file:
        header, *rows = csv.reader(file)
    return header, np.array(rows, float)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """A folder with a table, and a model of two of its three columns, in an order of their own."""
    folder = tmp_path_factory.mktemp("fitted")
    table(folder / "data.csv", rows=200, columns=("a", "b", "c"))
    command = ["fit", f"{folder}/data.csv", "--out", f"{folder}/new/model.rf", "--columns", "c,a", *TINY]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([*command, "--learning-rate", "1e-6"]) == 0
    assert os.listdir(folder / "new") == ["model.rf"]
    (folder / "new" / "model.rf").rename(folder / "model.rf")
    (folder / "said.txt").write_text(said.getvalue())
    return folder


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Run a command in a folder of its own: it must be refused in one line, with nothing written."""
    monkeypatch.chdir(tmp_path)

    def run(*command):
        before = sorted(path.name for path in tmp_path.rglob("*"))
        code = main([str(word) for word in command])
        said = capsys.readouterr()
        assert code == 2
        assert said.out == ""
        assert said.err.startswith("roughflow: error: ")
        assert said.err.count("\n") == 1
        assert sorted(path.name for path in tmp_path.rglob("*")) == before
        return said.err

    return run


def test_help_is_a_tour(capsys):
    assert main(["--help"]) == 0
    tour = capsys.readouterr().out
    places = [
        tour.index(f"\n  {name} ")
        for name in ("demo", "fit", "score", "sample", "tune", "estimate", "reproduce")
    ]
    assert places == sorted(places)
    assert tour.count("roughflow fit ") == 1


@pytest.mark.parametrize("command", ["demo", "fit", "score", "sample", "tune", "estimate", "reproduce"])
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
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
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
    monkeypatch.setattr(start, "MEGABYTES", 0.6)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    keep_programs()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    assert os.listdir(folder) == ["new"]
    # On a processor that knows other instructions they would not run.
    monkeypatch.setattr(start, "_processor", lambda: "another")
    assert cache_folder() != folder


def test_interrupted_while_it_starts():
    """JAX might lose the exception: the program ends at once, in one line."""
    code = (
        "import os, signal; from roughflow.cli.start import starting\n"
        "with starting(): os.kill(os.getpid(), signal.SIGINT); print('on')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "roughflow: interrupted\n")


def test_standard_output_that_is_closed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["--version"]) == 2
    assert "standard output is closed" in capsys.readouterr().err


def test_fit_reports_the_gaussian_it_started_from(fitted):
    """After two small steps the model is still near the normal distribution, in the units of the data."""
    said = (fitted / "said.txt").read_text()
    assert "rows        200: 180 to train on, 20 to validate on" in said
    assert "columns     c, a" in said
    assert "regression  2 steps\nlikelihood  2 steps\n" in said
    assert f"model       {fitted}/new/model.rf" in said
    words = next(line for line in said.splitlines() if line.startswith("validation")).split()
    assert float(words[1]) == pytest.approx(float(words[-1]), abs=1e-3)
    # Of a normal distribution with standard deviation 2 in two dimensions.
    assert float(words[-1]) == pytest.approx(-(np.log(2 * np.pi) + 1 + 2 * np.log(2)), abs=0.7)


def test_a_model_finds_its_columns_by_name(fitted, tmp_path, capsys):
    assert rf.load(fitted / "model.rf").columns == ("c", "a")
    out = tmp_path / "scores.csv"
    assert main(["score", f"{fitted}/model.rf", f"{fitted}/data.csv", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == ""
    header, scores = read(out)
    assert header == ["log_prob", "total_error", "effective_paths"]
    rows = read(fitted / "data.csv")[1][:, [2, 0]]
    expected = rf.load(fitted / "model.rf").log_prob(jnp.asarray(rows), key=jax.random.key(0))
    np.testing.assert_allclose(scores[:, 0], expected, rtol=1e-5)
    assert f"{scores[:, 0].mean():.4f} over 200 rows" in said.err
    # An .npy file has places only.
    np.save(tmp_path / "rows.npy", rows)
    assert main(["score", f"{fitted}/model.rf", str(tmp_path / "rows.npy")]) == 0
    again = np.loadtxt(capsys.readouterr().out.splitlines(), delimiter=",", skiprows=1)
    # Another file, another order of summation.
    np.testing.assert_allclose(again, scores, rtol=1e-9, atol=1e-12)


def test_samples_in_both_formats(fitted, tmp_path, capsys):
    command = ["sample", f"{fitted}/model.rf", "-n", "5", "--seed", "3"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert main([*command, "--out", str(tmp_path / "s.csv")]) == 0
    assert main([*command, "--out", str(tmp_path / "s.npy")]) == 0
    assert (tmp_path / "s.csv").read_text() == printed
    header, rows = read(tmp_path / "s.csv")
    assert header == ["c", "a"]
    np.testing.assert_array_equal(np.load(tmp_path / "s.npy"), rows.astype(np.load(tmp_path / "s.npy").dtype))
    assert main([*command[:-1], "4"]) == 0
    assert capsys.readouterr().out != printed


def test_a_plain_flow_is_a_model_too(tmp_path, capsys):
    rf.save(tmp_path / "flow.rf", rf.neural_flow(2, noise=0.0, width=4, depth=1, key=jax.random.key(0)))
    assert main(["sample", str(tmp_path / "flow.rf"), "-n", "2"]) == 0
    assert capsys.readouterr().out.startswith("x1,x2\n")


def test_parquet(fitted, tmp_path, capsys):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    header, rows = read(fitted / "data.csv")
    good = {name: column for name, column in zip(header, rows.T, strict=True)}
    pq.write_table(pa.table(good | {"name": ["x"] * 200}), tmp_path / "data.parquet")
    assert main(["score", f"{fitted}/model.rf", str(tmp_path / "data.parquet")]) == 0
    from_parquet = capsys.readouterr().out
    assert main(["score", f"{fitted}/model.rf", f"{fitted}/data.csv"]) == 0
    assert capsys.readouterr().out == from_parquet
    assert main(["fit", str(tmp_path / "data.parquet"), "--out", str(tmp_path / "m.rf")]) == 2
    assert "column 'name' holds string, not numbers" in capsys.readouterr().err
    pq.write_table(pa.table({"c": [1.0, None], "a": [1, 2]}), tmp_path / "null.parquet")
    assert main(["score", f"{fitted}/model.rf", str(tmp_path / "null.parquet")]) == 2
    assert "row 2 cannot be used, because 'c' is nan" in capsys.readouterr().err


def test_parquet_names_the_package_it_needs(refused, tmp_path, monkeypatch):
    (tmp_path / "data.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'roughflow[parquet]'" in refused("fit", "data.parquet", "--out", "m.rf")


def test_bad_tables(refused, tmp_path):
    fit = lambda name, *options: refused("fit", name, "--out", "m.rf", *options)
    assert "there is no file none.csv" in fit("none.csv")
    (tmp_path / "empty.csv").touch()
    assert "empty.csv is empty" in fit("empty.csv")
    (tmp_path / "header.csv").write_text("a,b\n")
    assert "no rows" in fit("header.csv")
    (tmp_path / "data.txt").write_text("a,b\n1,2\n")
    assert "ends in .csv, .tsv (or either with .gz), .npy or .parquet" in fit("data.txt")
    (tmp_path / "folder.csv").mkdir()
    assert "is a folder" in fit("folder.csv")
    (tmp_path / "latin.csv").write_bytes("größe,b\n1,2\n".encode("latin-1"))
    assert "UTF-8" in fit("latin.csv")
    (tmp_path / "semicolon.csv").write_text("a;b\n1;2\n")
    assert "commas" in fit("semicolon.csv")
    (tmp_path / "headless.csv").write_text("1,2\n3,4\n")
    assert "names" in fit("headless.csv")
    (tmp_path / "twice.csv").write_text("a,a\n3,4\n")
    assert "two columns named 'a'" in fit("twice.csv")
    (tmp_path / "bad.npy").write_bytes(b"not an array")
    assert "damaged" in fit("bad.npy")
    np.save(tmp_path / "flat.npy", np.zeros(3))
    assert "(rows, columns) is wanted, got (3,)" in fit("flat.npy")
    np.save(tmp_path / "pickle.npy", np.array([{}]), allow_pickle=True)
    assert "not an array" in fit("pickle.npy")
    table(tmp_path / "data.csv")
    assert "no column 'z'; it has a, b" in fit("data.csv", "--columns", "a,z")


def test_bad_rows_are_named_by_their_lines(refused, tmp_path):
    fit = lambda name, *options: refused("fit", name, "--out", "m.rf", *options)
    (tmp_path / "nan.csv").write_text("a,b\n1,2\n\n3,nan\n5,6\n7,\n8,inf\n")
    assert "lines 4, 6, 7 cannot be used, the first because 'b' is 'nan'" in fit("nan.csv")
    (tmp_path / "text.csv").write_text('a,b\n1,2\n"two\nlines",3\n4,5\n')
    assert "line 3 cannot be used" in fit("text.csv")
    (tmp_path / "dates.csv").write_text("day,a\n2024-01-31,2\n")
    assert "'day' is '2024-01-31', a date (roughflow estimate fits SDEs to series)" in fit("dates.csv")
    (tmp_path / "many.csv").write_text("a\n1\n" + "one\n" * 20)
    assert "lines 3, 4, 5, 6, 7 and 15 more" in fit("many.csv")
    (tmp_path / "ragged.csv").write_text("a,b\n1,2\n3\n")
    assert "line 3 cannot be used, because it has 1 cell under 2 names" in fit("ragged.csv")
    np.save(tmp_path / "nan.npy", [[1.0, 2.0], [np.nan, 3.0]])
    assert "row 2 cannot be used, because 'x1' is nan" in fit("nan.npy")


def test_tables_that_are_not_what_their_names_say(refused, tmp_path):
    fit = lambda name, text: (tmp_path / name).write_text(text) and refused("fit", name, "--out", "m.rf")
    index = fit("index.csv", ",a,b\n0,1,2\n")
    assert "column 1 has no name, as pandas writes its index" in index
    assert "with --columns a,b" in index
    assert "column 3 has no name: its first line ends with" in fit("end.csv", "a,b,\n1,2,\n")
    assert "3 cells under 2 names, and ends with a separator" in fit("ends.csv", "a,b\n1,2,\n")
    assert "separated by spaces, not commas" in fit("space.csv", "a b\n1 2\n")
    assert "separated by bars, not commas" in fit("bar.csv", "a|b\n1|2\n")
    assert "separated by tabs, not commas: name it .tsv" in fit("tab.csv", "a\tb\n1\t2\n")
    quote = fit("quote.csv", 'a,b\n"1,2\n3,4\n5,6\n')
    assert "line 2 cannot be used" in quote
    assert "a quote opened there ends on line 4 or never" in quote
    assert "line 3 cannot be used, because 'a' is '1e200', too large" in fit("l.csv", "a\n1\n1e200\n")
    assert "is not compressed by gzip" in fit("plain.csv.gz", "a,b\n1,2\n")
    (tmp_path / "packed.csv").write_bytes(gzip.compress(b"a,b\n1,2\n"))
    assert "is compressed: call it packed.csv.gz" in refused("fit", "packed.csv", "--out", "m.rf")
    np.save(tmp_path / "none.npy", np.zeros((0, 2)))
    assert "none.npy has no rows" in refused("fit", "none.npy", "--out", "m.rf")


def test_tables_with_tabs_compressed_and_from_standard_input(fitted, tmp_path, capsys, monkeypatch):
    """The same rows give the same scores, in whatever form they come and go."""
    score = lambda data, *out: main(["score", f"{fitted}/model.rf", str(data), "--quiet", *out])
    text = (fitted / "data.csv").read_text()
    assert score(fitted / "data.csv") == 0
    expected = capsys.readouterr().out
    (tmp_path / "data.tsv").write_text(text.replace(",", "\t"))
    (tmp_path / "data.csv.gz").write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    monkeypatch.chdir(tmp_path)
    for data in ("data.tsv", "data.csv.gz", "-"):
        assert score(data, "--out", "-") == 0
        assert capsys.readouterr().out == expected
    assert score("data.tsv", "--out", "s.tsv") == score("data.tsv", "--out", "s.csv.gz") == 0
    assert (tmp_path / "s.tsv").read_text() == expected.replace(",", "\t")
    assert gzip.decompress((tmp_path / "s.csv.gz").read_bytes()).decode() == expected
    assert not (tmp_path / "-").exists()


def test_standard_input_is_read_once_for_what_is_given(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(table(tmp_path / "data.csv").read_text()))
    assert (
        main(["fit", "-", "--given", "a", "--out", f"{tmp_path}/m.rf", *TINY, "--likelihood-steps", "0"]) == 0
    )
    said = capsys.readouterr().out
    assert "columns     b given a" in said
    assert "the Gaussian with their mean and covariance" in said
    assert rf.load(tmp_path / "m.rf").columns == ("b", "a")


def test_many_samples_are_drawn_in_blocks(fitted, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["roughflow.cli.sample"], "CHUNK", 4)
    command = ["sample", f"{fitted}/model.rf", "-n", "10", "--out"]
    assert main([*command, f"{tmp_path}/s.csv"]) == main([*command, f"{tmp_path}/s.npy"]) == 0
    rows = np.load(tmp_path / "s.npy")
    assert rows.shape == (10, 2)
    assert len(np.unique(rows[:, 0])) == 10
    np.testing.assert_array_equal(read(tmp_path / "s.csv")[1].astype(rows.dtype), rows)


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


def test_a_fit_says_why_it_ended(tmp_path, capsys):
    """At this rate every look but the first is worse."""
    table(tmp_path / "data.csv", rows=60)
    options = ["--steps", "400", "--patience", "1", "--learning-rate", "3", "--likelihood-steps", "0"]
    assert main(["fit", f"{tmp_path}/data.csv", "--out", f"{tmp_path}/m.rf", *TINY, *options]) == 0
    said = capsys.readouterr().out
    assert re.search(r"steps; ended at step \d+ of 400: no better in 1 look at the validation data", said)


def test_a_model_that_another_run_wrote_meanwhile_is_kept(tmp_path, capsys, monkeypatch):
    table(tmp_path / "data.csv")
    out, fit_density = tmp_path / "m.rf", rf.fit_density
    slow = lambda *a, **k: (fit_density(*a, **k), out.write_text("another's"))[0]
    monkeypatch.setattr(rf, "fit_density", slow)
    options = [*TINY, "--likelihood-steps", "0"]
    assert main(["fit", f"{tmp_path}/data.csv", "--out", str(out), *options]) == 0
    assert out.read_text() == "another's"
    assert rf.load(tmp_path / "m-2.rf").columns == ("a", "b")
    assert "m-2.rf" in capsys.readouterr().err


def test_a_fit_takes_what_fit_density_takes(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(rf, "fit_density", lambda *_, **options: given.update(options) or exit(7))
    table(tmp_path / "data.csv")
    options = ["--bounds", "a=-9:,b=-9:99", "--rounding", "a=0.5", "--noise", "best", "--outliers", "0.1"]
    with pytest.raises(SystemExit):
        main(["fit", f"{tmp_path}/data.csv", "--out", f"{tmp_path}/m.rf", *options, "--no-marginals"])
    assert given["bounds"] == {"a": (-9, None), "b": (-9, 99)}
    assert given["rounding"] == {"a": 0.5}
    assert (given["noise"], given["outliers"]) == ("best", 0.1)
    assert (given["marginals"], given["smoothing"]) == (False, None)


def test_a_warning_names_the_options_of_the_command_line(tmp_path, capsys):
    write(tmp_path / "data.csv", ["a", "b"], [[i % 3, i**1.5] for i in range(30)])
    options = [*TINY, "--likelihood-steps", "0"]
    assert main(["fit", f"{tmp_path}/data.csv", "--out", f"{tmp_path}/m.rf", *options]) == 0
    said = capsys.readouterr().err
    assert "column 'a' has only 3 different values" in said
    assert "(--given), or say how wide its steps are (--rounding) (see faq: few-different-values)" in said


def test_two_fits_at_once_do_not_share_a_file(refused, tmp_path):
    table(tmp_path / "data.csv")
    with rf.learn.held(tmp_path / "m.rf", "busy"):
        assert "another run is at work on m.rf: wait" in refused("fit", "data.csv", "--out", "m.rf", *TINY)
    with rf.learn.held(tmp_path / "n.rf.checkpoint", "busy"):
        assert "is in use by another run" in refused("fit", "data.csv", "--out", "n.rf", *TINY)
    assert main(["fit", "data.csv", "--out", "m.rf", *TINY]) == 0
    assert sorted(os.listdir()) == ["data.csv", "m.rf"]


def test_rows_without_a_density(refused, tmp_path):
    fit = lambda name, *options: refused("fit", name, "--out", "m.rf", *TINY, *options)
    write(tmp_path / "still.csv", ["a", "b"], [[i, 7] for i in range(20)])
    assert "column 'b' is always 7, so it has no density: leave it out, with --columns a" in fit("still.csv")
    table(tmp_path / "one.csv", rows=1)
    assert "one.csv has 1 row" in fit("one.csv")
    table(tmp_path / "sixty.csv", rows=60)
    left = fit("sixty.csv", "--validation", "0.99")
    assert "1 of 60 rows are left to train on, 3 are the least" in left
    assert "lower --validation" in left
    write(tmp_path / "line.csv", ["a", "b"], [[i, 2 * i] for i in range(20)])
    assert "linearly dependent" in fit("line.csv")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--steps", "0"], "--steps: a whole number of at least 1 is wanted, got '0'"),
        (["--steps", "2.5"], "--steps"),
        (["--noise", "-1"], "--noise: best, or a number of at least 0"),
        (["--noise", "nan"], "--noise"),
        (
            ["--bounds", "a=0"],
            "--bounds: different columns with their values, share=0:1,income=0:, are wanted",
        ),
        (["--bounds", "c=0:"], "there is no column 'c' to model; there are a, b"),
        (["--bounds", "a=0:1"], "not strictly between its bounds 0 and 1"),
        (["--rounding", "a=1,a=2"], "--rounding: different columns"),
        (["--rounding", "a=-1"], "rounding must be positive"),
        (["--smoothing", "-1"], "--smoothing: a number of at least 0"),
        (["--outliers", "1"], "--outliers: a share"),
        (["--noise", "best", "--validation", "0"], "the best noise is chosen on rows set aside"),
        (["--seed", "one"], "--seed"),
        (["--seed", "99999999999"], "--seed: a whole number from 0 to 2147483647 is wanted"),
        (["--validation", "1"], "--validation: a share"),
        (["--learning-rate", "0"], "--learning-rate"),
        (["--columns", "a,,b"], "--columns"),
        (["--step", "5"], "unrecognized arguments: --step 5"),
    ],
)
def test_bad_options(refused, tmp_path, options, reason):
    table(tmp_path / "data.csv")
    assert reason in refused("fit", "data.csv", "--out", "m.rf", *options)


def test_bad_commands(refused):
    assert "name a command" in refused()
    assert "invalid choice" in refused("fitt")
    assert "--out" in refused("fit", "data.csv")
    assert "fig9" in refused("reproduce", "fig9")


def test_bad_places_to_write_to(refused, tmp_path, fitted):
    data, model = fitted / "data.csv", fitted / "model.rf"
    (tmp_path / "there.rf").write_text("mine")
    assert "--force overwrites it" in refused("fit", data, "--out", "there.rf")
    assert "there.rf is a file, not a folder" in refused("fit", data, "--out", "there.rf/m.rf")
    assert "is a folder" in refused("fit", data, "--out", ".")
    assert "--force" in refused("score", model, data, "--out", "there.rf")
    assert "what is read from" in refused("score", model, data, "--out", data, "--force")
    assert "or .npy" in refused("sample", model, "--out", "samples.txt")
    assert "is a file" in refused("demo", "--out", "there.rf")
    assert "a device or a pipe" in refused("sample", model, "--out", "/dev/null", "--force")
    assert "cannot write /proc/s.csv" in refused("sample", model, "--out", "/proc/s.csv")
    assert "name a file" in refused("fit", data, "--out", "-")
    assert "the name of the scores ends in .csv" in refused("score", model, data, "--out", "scores.npy")
    assert (tmp_path / "there.rf").read_text() == "mine"


def test_force_overwrites(fitted, tmp_path):
    out = tmp_path / "s.csv"
    out.write_text("mine")
    assert main(["sample", f"{fitted}/model.rf", "-n", "5", "--out", str(out), "--force"]) == 0
    assert read(out)[1].shape == (5, 2)
    link = tmp_path / "link.csv"
    link.symlink_to(out)
    assert main(["sample", f"{fitted}/model.rf", "-n", "3", "--out", str(link), "--force"]) == 0
    assert link.is_symlink()
    assert read(out)[1].shape == (3, 2)


def test_bad_models(refused, tmp_path, fitted):
    whole = (fitted / "model.rf").read_bytes()
    assert "there is no file none.rf" in refused("sample", "none.rf")
    assert "is a folder" in refused("sample", ".")
    (tmp_path / "text.rf").write_text("hello")
    assert "is not a roughflow model" in refused("sample", "text.rf")
    (tmp_path / "half.rf").write_bytes(whole[: len(whole) // 2])
    assert "damaged" in refused("sample", "half.rf")
    middle = whole.index(b"\x93NUMPY") + 140
    (tmp_path / "bit.rf").write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    assert "damaged" in refused("sample", "bit.rf")
    rf.save(tmp_path / "base.rf", rf.Normal(jnp.zeros(2)))
    assert "holds a Normal, not a density" in refused("sample", "base.rf")


def test_tables_that_do_not_fit_the_model(refused, tmp_path, fitted):
    table(tmp_path / "other.csv", columns=("a", "b"))
    assert "has no column 'c'; it has a, b" in refused("score", fitted / "model.rf", "other.csv")
    np.save(tmp_path / "three.npy", np.zeros((4, 3)))
    assert "has 3 columns, and the model 2: c, a" in refused("score", fitted / "model.rf", "three.npy")


def interrupt_after(monkeypatch, steps):
    """Press Ctrl-C once the fit has saved its state at that step."""
    write_archive = rf.learn._checkpoint.write_archive
    pressed = []

    def write(path, header, arrays):
        write_archive(path, header, arrays)
        if header["step"] == steps and not pressed:
            pressed.append(steps)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(rf.learn._checkpoint, "write_archive", write)
    monkeypatch.setattr(rf.learn._checkpoint, "SECONDS", 0.0)


def test_stop_and_resume(refused, tmp_path, capsys, monkeypatch):
    table(tmp_path / "data.csv")
    command = ["fit", "data.csv", "--out", "model.rf", *TINY, "--steps", "6"]
    assert "no checkpoint model.rf.checkpoint to go on from" in refused(*command, "--resume")
    assert main([*command[:3], "whole.rf", *command[4:]]) == 0
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1)
        capsys.readouterr()
        assert main(command) == 130
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "stopped at step 1" in said
    assert "roughflow fit data.csv --out model.rf" in said
    assert said.endswith(" --resume\n")
    kept = ["model.rf.checkpoint", "model.rf.checkpoint.options"]
    assert sorted(os.listdir()) == ["data.csv", *kept, "whole.rf"]

    assert "--resume goes on from it, --force starts afresh" in refused(*command)
    others = [("seed", 0, 1), ("validation", 0.1, 0.2), ("steps", 6, 7), ("noise", 0.0, 0.5), ("width", 4, 5)]
    for option, before, now in others:
        said = refused(*command, "--resume", f"--{option}", now)
        assert f"holds a run with --{option} {before}, this one is with --{option} {now}:" in said
    assert "a run without --rounding, this one is with" in refused(*command, "--resume", "--rounding", "a=1")
    good = (tmp_path / "data.csv").read_text()
    table(tmp_path / "data.csv", seed=1)
    assert "another run: data" in refused(*command, "--resume")
    (tmp_path / "data.csv").write_text(good)

    assert main([*command, "--resume"]) == 0
    assert sorted(os.listdir()) == ["data.csv", "model.rf", "whole.rf"]
    same = jax.tree.map(np.array_equal, *(rf.load(tmp_path / name) for name in ("model.rf", "whole.rf")))
    assert all(jax.tree.leaves(same))


@pytest.fixture
def terminated(monkeypatch):
    """As a batch system does it, by SIGTERM, which would end Python on the spot: after so many chunks."""

    def after(count):
        def chunks(*args, **settings):
            after.first = settings["first"]
            for i, estimate in enumerate(estimate_chunks(*args, **settings)):
                if i == count:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield estimate

        monkeypatch.setattr(rf, "estimate_chunks", chunks)

    estimate_chunks = rf.estimate_chunks
    return after


def test_a_command_that_is_terminated_leaves_no_draft(fitted, tmp_path, capsys, monkeypatch, terminated):
    before = signal.getsignal(signal.SIGTERM)
    terminated(0)
    monkeypatch.chdir(tmp_path)
    command = ["score", f"{fitted}/model.rf", f"{fitted}/data.csv", "--out", "scores.csv", "--quiet"]
    assert main(command) == 143
    told = "stopped at row 0 of 200 before there was anything to keep"
    assert capsys.readouterr().err == f"roughflow: {told}\n"
    assert os.listdir() == []
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ["scores.csv", "scores.tsv.gz"])
def test_scores_that_were_cut_short_go_on(fitted, tmp_path, capsys, monkeypatch, terminated, refused, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("roughflow.cli.score.CHUNK", 64)
    score = ["score", f"{fitted}/model.rf", f"{fitted}/data.csv", "--quiet"]
    command = [*score, "--out", name]
    assert main([*score, "--out", f"whole-{name}"]) == 0
    said = capsys.readouterr().err
    terminated(2)
    assert main(command) == 143
    again = shlex.join(["roughflow", *command, "--resume"])
    told = f"stopped at row 128 of 200, kept in {name}.checkpoint; go on with: {again}"
    assert capsys.readouterr().err == f"roughflow: {told}\n"

    assert "holds a run that was cut short" in refused(*command)
    assert "with --seed 0, this one is with --seed 1" in refused(*command, "--resume", "--seed", "1")
    rows = (fitted / "data.csv").read_text().splitlines(keepends=True)
    Path("other.csv").write_text("".join([rows[0], *reversed(rows[1:])]))
    assert "has changed" in refused("score", score[1], "other.csv", "--out", name, "--resume")
    with open(f"{name}.checkpoint.rows", "ab") as file:
        file.write(1000 * b"half a chunk\n")  # of a process that was killed as it wrote
    terminated(None)
    assert main([*command, "--resume"]) == 0
    assert terminated.first == 2  # so that chunks have the random numbers of their place
    assert capsys.readouterr().err == said
    assert Path(name).read_bytes() == Path(f"whole-{name}").read_bytes()
    assert sorted(os.listdir()) == sorted(["other.csv", name, f"whole-{name}"])
    assert "--resume goes on with a file" in refused(*score, "--resume")


TARGETS = """\
import jax.numpy as jnp

def bell(z):
    return -0.5 * jnp.sum((z - 3) ** 2)

def two(z):
    return z[:2]

def second(z):
    return -(z[1] ** 2)

def nowhere(z):
    return jnp.where(z[0] > 100, 0.0, -jnp.inf)

def pair(z):
    return z @ jnp.ones(2)

class Half:
    dimension = 1.5
    __call__ = staticmethod(bell)

NUMBER, HALF = 3, Half()
"""


@pytest.fixture
def targets(tmp_path, monkeypatch):
    """A module of targets in the current folder."""
    (tmp_path / "targets.py").write_text(TARGETS)
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "lacking.py").write_text("import math; math.nonexistent")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("targets", None)


def test_bad_targets(targets, refused):
    tune = lambda name, *more: refused("tune", name, "--out", "d.csv", "--dimension", "1", *more)
    assert "'targets' does not name a target: write MODULE:FUNCTION" in tune("targets")
    assert "there is no module nowhere here" in tune("nowhere:f")
    assert "the module targets has no f" in tune("targets:f")
    assert "importing broken failed: ZeroDivisionError" in tune("broken:f")
    assert "targets:NUMBER is a int, not a function" in tune("targets:NUMBER")
    assert "must return one number for z, got shape (1,)" in tune("targets:two")
    assert "targets:pair fails for z of shape (1,); it must be written with jax.numpy" in tune("targets:pair")
    assert "--gradients must be at least" in tune("targets:bell", "--gradients", "10")
    assert "--noise-out d.csv is where something else goes" in tune("targets:bell", "--noise-out", "d.csv")
    assert "index 1 is out of bounds" in tune("targets:second")
    assert "not finite where the chains start, around [0.0]" in tune("targets:nowhere")
    assert "importing lacking failed: AttributeError" in tune("lacking:f")
    assert "its dimension must be a whole number" in refused("tune", "targets:HALF", "--out", "d.csv")
    assert "does not say its dimension: give --dimension" in refused("tune", "targets:bell", "--out", "d.csv")
    assert "the name of the draws ends in" in refused("tune", "targets:bell", "--out", "d.txt")


@pytest.mark.slow
def test_tune_draws_from_a_density_stops_and_goes_on(targets, refused, capsys, monkeypatch):
    """A normal target around 3, also from a run that was cut in two: the same draws to the last digit."""
    small = ["--dimension", "1", "--chains", "16", "--gradients", "9000", "--draws", "40", "--thin", "5"]
    command = ["tune", "targets:bell", "--quiet", *small, "--out"]
    assert main([*command, "whole.csv", "--noise-out", "noise.rf"]) == 0
    assert "acceptance 0." in capsys.readouterr().out
    header, *rows = (targets / "whole.csv").read_text().split()
    assert header == "chain,draw,z0"
    values = np.array([row.split(",") for row in rows], float)
    assert values.shape == (640, 3)
    assert abs(values[:, 2].mean() - 3) < 0.2
    assert abs(values[:, 2].std() - 1) < 0.2
    assert rf.load(targets / "noise.rf")(0.0, jax.numpy.zeros(1)).shape == (1, 1)
    with monkeypatch.context() as patch:
        interrupt_after(patch, 1)
        assert main([*command, "d.csv"]) == 130
    assert "roughflow tune targets:bell" in capsys.readouterr().err
    assert "--resume goes on from it" in refused(*command, "d.csv")
    assert main([*command, "d.csv", "--resume"]) == 0
    assert (targets / "d.csv").read_text() == (targets / "whole.csv").read_text()
    assert not (targets / "d.csv.checkpoint").exists()


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
        (name, out) for name in ("fig1", "fig2", "fig3", "fig4", "toys")
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


@pytest.mark.slow
def test_a_noisy_fit_scores_better_than_the_gaussian(tmp_path, capsys):
    """The whole way, with the default noise: two well separated lumps are no Gaussian."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(-3, 0.5, (300, 1)), rng.normal(3, 0.5, (300, 1))]) * 10 + 500
    write(tmp_path / "lumps.csv", ["height"], rows)
    command = ["fit", f"{tmp_path}/lumps.csv", "--out", f"{tmp_path}/m.rf", "--steps", "150", "--quiet"]
    assert main([*command, "--width", "16", "--depth", "2"]) == 0
    words = next(s for s in capsys.readouterr().out.splitlines() if s.startswith("validation")).split()
    assert float(words[1]) > float(words[-1]) + 0.3
    write(tmp_path / "some.csv", ["height"], rows[::10])
    assert main(["score", f"{tmp_path}/m.rf", f"{tmp_path}/some.csv", "--tolerance", "0.05"]) == 0
    _, *scores = csv.reader(capsys.readouterr().out.splitlines())
    scores = np.array(scores, float)
    assert np.mean(scores[:, 0]) == pytest.approx(float(words[1]), abs=0.3)
    assert np.mean(scores[:, 1] < 0.05) > 0.95
