"""Tables that are read and written: formats, bad rows, bad places."""

import csv
import gzip
import io
import sys

import numpy as np
import pytest
from commands import TINY, read, table

import roughflow as rf
from roughflow.cli import main


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
    assert "column 1 has no name, which may be an index written by pandas" in index
    assert "with --columns a,b" in index
    assert "column 3 has no name: its first line ends with" in fit("end.csv", "a,b,\n1,2,\n")
    assert "3 cells under 2 names, and ends with a separator" in fit("ends.csv", "a,b\n1,2,\n")
    assert "separated by spaces, not commas" in fit("space.csv", "a b\n1 2\n")
    assert "separated by bars, not commas" in fit("bar.csv", "a|b\n1|2\n")
    assert "separated by tabs, not commas: name it .tsv" in fit("tab.csv", "a\tb\n1\t2\n")
    quote = fit("quote.csv", 'a,b\n"1,2\n3,4\n5,6\n')
    assert "line 2 cannot be used" in quote
    assert "a quoted cell that begins there ends on line 4 or not at all" in quote
    assert "line 3 cannot be used, because 'a' is '1e200', too large" in fit("l.csv", "a\n1\n1e200\n")
    assert "is not a valid gzip file" in fit("plain.csv.gz", "a,b\n1,2\n")
    (tmp_path / "packed.csv").write_bytes(gzip.compress(b"a,b\n1,2\n"))
    assert "is compressed: rename it to packed.csv.gz" in refused("fit", "packed.csv", "--out", "m.rf")
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
    assert "Gaussian " in said
    assert rf.load(tmp_path / "m.rf").columns == ("b", "a")


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


@pytest.fixture(scope="module")
def patients(tmp_path_factory):
    """A table with texts, integers and missing cells, and a mixture fitted to it with a report."""
    folder, rng = tmp_path_factory.mktemp("patients"), np.random.default_rng(0)
    old = rng.random(150) < 0.4
    age = np.where(old, 60, 30) + rng.integers(0, 15, 150)
    pressure = 100 + age / 2 + rng.normal(0, 5, 150)
    rows = [["old" if a else "young", b, f"{c:.3f}"] for a, b, c in zip(old, age, pressure, strict=True)]
    rows[0][2], rows[1][0], rows[2][1] = "NA", "", "nan"
    with open(folder / "data.csv", "w", newline="") as file:
        csv.writer(file).writerows([["group", "age", "pressure"], *rows])
    arguments = [f"{folder}/data.csv", "--out", f"{folder}/m.rf", "--types", "age=integer"]
    report = ["--report", f"{folder}/r.html", "--quiet"]
    assert main(["fit", *arguments, "--family", "mixture", *report]) == 0
    return folder


def test_texts_and_missing_cells(patients, capsys):
    model, data = f"{patients}/m.rf", f"{patients}/data.csv"
    assert rf.load(model).encoding.types == ("category", "integer", "continuous")
    assert main(["score", model, data, "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 151
    assert "over 150 rows" in err
    assert main(["sample", model, "-n", "20"]) == 0
    header, *drawn = csv.reader(capsys.readouterr().out.splitlines())
    assert header == ["group", "age", "pressure"]
    assert {row[0] for row in drawn} <= {"old", "young"}
    assert main(["impute", model, data, "-n", "2"]) == 0
    filled = list(csv.reader(capsys.readouterr().out.splitlines()))[1:]
    there = list(csv.reader((patients / "data.csv").read_text().splitlines()))[1:]
    assert len(filled) == 300
    assert 100 < float(filled[0][2]) < 160
    assert filled[1][0] in ("old", "young")
    assert [float(row[1]) for row in filled[3:150]] == [float(row[1]) for row in there[3:]]


def test_a_mixture_reads_other_formats(patients, capsys, monkeypatch):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    score = lambda data: main(["score", f"{patients}/m.rf", str(data), "--quiet"])
    rows = list(csv.reader((patients / "data.csv").read_text().splitlines()))[1:]
    number = lambda text: None if text in ("NA", "nan") else float(text)
    columns = {
        "group": [row[0] or None for row in rows],
        "age": [number(row[1]) for row in rows],
        "pressure": [number(row[2]) for row in rows],
    }
    pq.write_table(pa.table(columns), patients / "data.parquet")
    assert score(patients / "data.csv") == score(patients / "data.parquet") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:151] == out[151:]
    monkeypatch.setattr(sys, "stdin", io.StringIO((patients / "data.csv").read_text()))
    assert score("-") == 0
    assert capsys.readouterr().out.splitlines() == out[:151]


def test_what_a_mixture_refuses(patients, refused, fitted, tmp_path):
    fit = lambda *options: refused("fit", patients / "data.csv", "--out", "m2.rf", *options)
    mixture = ("--family", "mixture")
    assert "'group' is 'young'" in fit()
    assert "does not support steps=" in fit(*mixture, "--steps", "5")
    assert "does not support given=" in fit(*mixture, "--given", "age")
    assert "column 'age' has 'number'" in fit(*mixture, "--types", "age=number")
    assert "text, so its type must be 'category'" in fit(*mixture, "--types", "group=integer")
    (tmp_path / "typo.csv").write_text("a,b\n1,2\n1x,3\n2,\n")
    typo = refused("fit", "typo.csv", "--out", "m2.rf", *mixture)
    assert "line 3 cannot be used, because 'a' is '1x' in a column of numbers" in typo
    assert "the model has text columns: choose a .csv" in refused(
        "sample", patients / "m.rf", "--out", "s.npy"
    )
    assert "impute needs a model fitted by roughflow fit --family mixture" in refused(
        "impute", fitted / "model.rf", fitted / "data.csv"
    )
    (tmp_path / "new.csv").write_text("group,age,pressure\nmiddle,40,\n")
    assert "a category that does not occur in the training table" in refused(
        "impute", patients / "m.rf", "new.csv"
    )


def test_the_report_on_a_mixture(patients):
    text = (patients / "r.html").read_text()
    for part in ("category, 2 levels, 0.7% missing", "integer, in steps of 1", "Coverage of intervals"):
        assert part in text
    share = int(text.split("50% intervals, ")[-1].split("%")[0])
    assert 80 <= share <= 98
    assert text.count("<img") == 4
