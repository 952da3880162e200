"""Bad input to the command line: exit code 2, one line on standard error, and no file made or changed.

A row is a command and what its message must say. `test_bad_inputs.py` has those of Python.
"""

import gzip
import os
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf

FIT = [
    ("", "missing command"),
    ("fitt table.csv", "invalid choice"),
    ("fit", "DATA"),
    ("fit table.csv", "--out"),
    ("fit table.csv --out", "--out"),
    ("fit table.csv --out m.rf --colour red", "--colour"),
    ("fit nothere.csv --out m.rf", "there is no file nothere.csv"),
    ("fit folder --out m.rf", "folder is a folder"),
    ("fit folder.csv --out m.rf", "folder.csv is a folder"),
    ("fit kept.txt --out m.rf", "kept.txt: a table must end in"),
    ("fit table --out m.rf", "table"),
    ("fit empty.csv --out m.rf", "empty.csv is empty"),
    ("fit pipe.csv --out m.rf", "pipe.csv is a device or a pipe"),
    ("fit zero.csv --out m.rf", "zero.csv is a device or a pipe"),
    ("fit header.csv --out m.rf", "header.csv has no rows"),
    ("fit nonames.csv --out m.rf", "nonames.csv: the first line must contain the names of the columns"),
    ("fit twice.csv --out m.rf", "twice.csv has two columns named 'a'"),
    ("fit unnamed.csv --out m.rf", "unnamed.csv: column 1 has no name"),
    ("fit text.csv --out m.rf", "'b' is 'x' (roughflow fit --family mixture fits text"),
    ("fit gap.csv --out m.rf", "'b' is empty"),
    ("fit blank.csv --out m.rf", "'b' is empty"),
    ("fit underscore.csv --out m.rf", "'b' is '1_000'"),
    ("fit comma.csv --out m.rf", "it has 3 cells under 2 names"),
    ("fit short.csv --out m.rf", "it has 1 cell under 2 names"),
    ("fit nan.csv --out m.rf", "'b' is 'nan'"),
    ("fit inf.csv --out m.rf", "'b' is 'inf'"),
    ("fit large.csv --out m.rf", "too large"),
    ("fit complex.csv --out m.rf", "'b' is '1+2j'"),
    ("fit dates.csv --out m.rf", "roughflow estimate"),
    ("fit semicolon.csv --out m.rf", "semicolons"),
    ("fit tabs.csv --out m.rf", "tabs"),
    ("fit spaces.csv --out m.rf", "spaces"),
    ("fit latin.csv --out m.rf", "latin.csv is not text in UTF-8"),
    ("fit packed.csv --out m.rf", "packed.csv is compressed"),
    ("fit plain.csv.gz --out m.rf", "plain.csv.gz is not a valid gzip file"),
    ("fit half.csv.gz --out m.rf", "half.csv.gz"),
    ("fit quote.csv --out m.rf", "quote"),
    ("fit constant.csv --out m.rf", "column 'a' is constant, and so are all others"),
    ("fit one.csv --out m.rf", "one.csv has 1 row"),
    ("fit few.csv --out m.rf", "rows to train on"),
    ("fit kept.npy --out m.rf", "kept.npy is not a valid .npy file"),
    ("fit line.npy --out m.rf", "line.npy: expected an array of shape (rows, columns)"),
    ("fit complex.npy --out m.rf", "complex.npy holds complex128"),
    ("fit words.npy --out m.rf", "words.npy holds"),
    ("fit pickle.npy --out m.rf", "pickle.npy"),
    ("fit nan.npy --out m.rf", "nan.npy: rows 1, 2"),
    ("fit none.npy --out m.rf", "none.npy has no rows"),
    ("fit huge.npy --out m.rf", "huge.npy"),
    ("fit kept.parquet --out m.rf", "kept.parquet is not a valid Parquet file"),
    ("fit words.parquet --out m.rf", "words.parquet: column 'b' holds"),
    ("fit table.csv --out m.rf --columns a,z", "no column 'z'"),
    ("fit table.csv --out m.rf --columns a,a", "different names"),
    ("fit table.csv --out m.rf --columns ,", "different names"),
    ("fit table.csv --out m.rf --given z", "no column 'z'"),
    ("fit table.csv --out m.rf --given a,b", "include all columns"),
    ("fit table.csv --out m.rf --family mixture --width 5 --marginals", "does not support flow=FlowOptions("),
    (
        "fit table.csv --out m.rf --family mixture --bounds a=0:1",
        "error: a mixture (family 'mixture', types=",
    ),
    ("fit table.csv --out m.rf --bounds a=5:1", "reversed"),
    ("fit table.csv --out m.rf --bounds a=1:1", "bounds"),
    ("fit table.csv --out m.rf --bounds a", "--bounds"),
    ("fit table.csv --out m.rf --bounds a=low:high", "--bounds"),
    ("fit table.csv --out m.rf --bounds z=0:1", "there is no column 'z' to model; the columns are a, b"),
    ("fit table.csv --out m.rf --bounds a=0:0.001", "its bounds 0 and 0.001"),
    ("fit table.csv --out m.rf --rounding a=x", "--rounding"),
    ("fit table.csv --out m.rf --rounding a=1,a=2", "--rounding: expected different columns"),
    ("fit table.csv --out m.rf --rounding a=-1", "rounding"),
    ("fit table.csv --out m.rf --rounding z=1", "z"),
    ("fit table.csv --out m.rf --noise -1", "--noise"),
    ("fit table.csv --out m.rf --noise loud", "--noise"),
    ("fit table.csv --out m.rf --noise nan", "--noise: expected best, or a number of at least 0"),
    ("fit table.csv --out m.rf --noise best --validation 0", "noise='best' needs validation rows"),
    ("fit table.csv --out m.rf --step 5", "unrecognized arguments: --step 5"),
    ("fit table.csv --out m.rf --smoothing -0.1", "--smoothing"),
    ("fit table.csv --out m.rf --outliers 1", "--outliers"),
    ("fit table.csv --out m.rf --steps 0", "--steps"),
    ("fit table.csv --out m.rf --steps 2.5", "--steps"),
    ("fit table.csv --out m.rf --likelihood-steps -1", "--likelihood-steps"),
    ("fit table.csv --out m.rf --seconds 0", "--seconds"),
    ("fit table.csv --out m.rf --seconds inf", "--seconds"),
    ("fit table.csv --out m.rf --width 0", "--width"),
    ("fit table.csv --out m.rf --depth none", "--depth"),
    ("fit table.csv --out m.rf --batch-size -5", "--batch-size"),
    ("fit table.csv --out m.rf --learning-rate 0", "--learning-rate"),
    ("fit table.csv --out m.rf --learning-rate nan", "--learning-rate"),
    ("fit table.csv --out m.rf --validation 1", "--validation"),
    ("fit table.csv --out m.rf --validation 0.99", "validation"),
    ("fit table.csv --out m.rf --patience -1", "--patience"),
    ("fit table.csv --out m.rf --seed -1", "--seed"),
    ("fit table.csv --out m.rf --seed 99999999999", "--seed"),
    ("fit table.csv --out m.rf --devices 0", "--devices"),
    ("fit table.csv --out m.rf --devices 999 --steps 1 --quiet", "devices"),
    ("fit table.csv --out m.rf --join here", "--join"),
    ("fit table.csv --out m.rf --join host:1,2,2", "--join"),
    ("fit table.csv --out m.rf --resume", "m.rf.checkpoint"),
    ("fit table.csv --out -", "choose a file"),
    ("fit table.csv --out .", "is a folder"),
    ("fit table.csv --out model.rf", "model.rf exists"),
    ("fit table.csv --out table.csv --force", "table.csv is also the input"),
    ("fit table.csv --out typo/m.rf", "there is no folder"),
    ("fit table.csv --out kept.txt/m.rf", "kept.txt is a file, not a folder"),
    ("fit table.csv --out /proc/m.rf", "cannot write /proc/m.rf"),
    ("fit table.csv --out /dev/null --force", "/dev/null is a device"),
    ("fit table.csv --out m.rf --report m.rf", "--report and --out"),
    ("fit table.csv --out m.rf --report kept.txt", "kept.txt exists"),
    ("fit table.csv --out m.rf --report typo/r.html", "there is no folder"),
]

SCORE = [
    ("score", "MODEL.rf"),
    ("score model.rf", "DATA"),
    ("score nothere.rf table.csv", "there is no file nothere.rf"),
    ("score folder table.csv", "folder is a folder"),
    ("score /dev/zero table.csv", "/dev/zero is a device"),
    ("score pipe.csv table.csv", "pipe.csv is a device or a pipe"),
    ("score kept.txt table.csv", "kept.txt is not a roughflow model"),
    ("score empty.csv table.csv", "empty.csv is not a roughflow model"),
    ("score bit.rf table.csv", "damaged"),
    ("score cut.rf table.csv", "cut.rf"),
    ("score base.rf table.csv", "base.rf holds a Normal"),
    ("score model.rf nothere.csv", "there is no file nothere.csv"),
    ("score model.rf pipe.csv", "pipe.csv is a device or a pipe"),
    ("score model.rf empty.csv", "empty.csv is empty"),
    ("score model.rf other.csv", "no column 'a'"),
    ("score model.rf text.csv", "'b' is 'x'"),
    ("score model.rf gap.csv", "'b' is empty"),
    ("score model.rf line.npy", "line.npy"),
    ("score model.rf three.npy", "three.npy has 3 columns"),
    ("score model.rf nan.npy", "nan.npy: rows 1, 2"),
    ("score model.rf table.csv --tolerance 0", "--tolerance"),
    ("score model.rf table.csv --tolerance tight", "--tolerance"),
    ("score model.rf table.csv --paths 0", "--paths"),
    ("score model.rf table.csv --paths 1.5", "--paths"),
    ("score model.rf table.csv --seed x", "--seed"),
    ("score model.rf table.csv --devices -1", "--devices"),
    ("score model.rf table.csv --resume", "--resume"),
    ("score model.rf table.csv --out s.csv --resume", "s.csv.checkpoint"),
    ("score model.rf table.csv --out s.txt", "s.txt: the scores must end in"),
    ("score model.rf table.csv --out s.npy", "s.npy: the scores must end in"),
    ("score model.rf table.csv --out typo/s.csv", "there is no folder"),
    ("score model.rf table.csv --out table.csv --force", "is also the input"),
    ("score model.rf table.csv --out twice.csv", "twice.csv exists"),
    ("score model.rf table.csv --out folder", "folder is a folder"),
]

SAMPLE = [
    ("sample", "MODEL.rf"),
    ("sample nothere.rf", "there is no file nothere.rf"),
    ("sample .", "is a folder"),
    ("sample /dev/zero", "/dev/zero is a device"),
    ("sample kept.txt", "kept.txt is not a roughflow model"),
    ("sample cut.rf", "cut.rf"),
    ("sample base.rf", "base.rf holds a Normal"),
    ("sample given.rf", "given.rf is conditional on b"),
    ("sample model.rf -n 0", "-n"),
    ("sample model.rf -n -4", "-n"),
    ("sample model.rf -n 1e3", "-n"),
    ("sample model.rf -n many", "-n"),
    ("sample model.rf --seed 1.5", "--seed"),
    ("sample model.rf --out s.txt", "s.txt: the samples must end in"),
    ("sample model.rf --out s.parquet", "s.parquet: the samples must end in"),
    ("sample model.rf --out typo/s.csv", "there is no folder"),
    ("sample model.rf --out kept.npy", "kept.npy exists"),
    ("sample model.rf --out model.rf --force", "is also the input"),
    ("sample model.rf --out /dev/null", "/dev/null is a device"),
    ("sample model.rf --out pipe.csv --force", "pipe.csv is a device or a pipe"),
    ("sample model.rf extra", "extra"),
]

TUNE = [
    ("tune", "MODULE:FUNCTION"),
    ("tune targets:bell", "--out"),
    ("tune targets --out d.csv", "targets"),
    ("tune :bell --out d.csv", "bell"),
    ("tune nomodule:f --out d.csv", "no module nomodule is installed"),
    ("tune targets:nothing --out d.csv", "targets has no nothing"),
    ("tune targets:NUMBER --out d.csv", "targets:NUMBER is a int"),
    ("tune broken:f --out d.csv", "importing broken failed"),
    ("tune targets:bell --out d.csv", "--dimension"),
    ("tune lacking:f --out d.csv", "importing lacking failed: AttributeError"),
    ("tune targets:pair --dimension 1 --out d.csv", "it must be written with jax.numpy"),
    ("tune targets:bell --dimension 0 --out d.csv", "--dimension"),
    ("tune targets:bell --dimension 1.5 --out d.csv", "--dimension"),
    ("tune targets:two --dimension 2 --out d.csv", "must return one number"),
    ("tune targets:second --dimension 1 --out d.csv", "fails for z of shape (1,)"),
    ("tune targets:nowhere --dimension 1 --out d.csv", "is not finite where the chains start"),
    ("tune targets:complexed --dimension 1 --out d.csv", "targets:complexed"),
    ("tune targets:FAR --out d.csv", "start"),
    ("tune targets:HALF --out d.csv", "dimension must be a whole number"),
    ("tune targets:bell --dimension 1 --out d.csv --chains 0", "--chains"),
    ("tune targets:bell --dimension 1 --out d.csv --gradients 10", "--gradients"),
    ("tune targets:bell --dimension 1 --out d.csv --gradients lots", "--gradients"),
    ("tune targets:bell --dimension 1 --out d.csv --draws -1", "--draws"),
    ("tune targets:bell --dimension 1 --out d.csv --thin 0", "--thin"),
    ("tune targets:bell --dimension 1 --out d.csv --seed -3", "--seed"),
    ("tune targets:bell --dimension 1 --out d.csv --resume", "d.csv.checkpoint"),
    ("tune targets:bell --dimension 1 --out -", "tune needs an output file"),
    ("tune targets:bell --dimension 1 --out d.txt", "d.txt: the draws must end in"),
    ("tune targets:bell --dimension 1 --out typo/d.csv", "there is no folder"),
    ("tune targets:bell --dimension 1 --out table.csv", "table.csv exists"),
    ("tune targets:bell --dimension 1 --out d.csv --noise-out d.csv", "--noise-out"),
    ("tune targets:bell --dimension 1 --out d.csv --noise-out base.rf", "base.rf exists"),
    ("tune targets:bell --dimension 1 --out d.csv --noise-out typo/n.rf", "there is no folder"),
]

ESTIMATE = [
    ("estimate", "SERIES.csv"),
    ("estimate rates.csv --value rate --model cir", "--time"),
    ("estimate rates.csv --time date --model cir", "--value"),
    ("estimate rates.csv --time date --value rate", "--model"),
    ("estimate rates.csv --time date --value rate --model heston", "heston"),
    ("estimate nothere.csv --time date --value rate --model cir", "there is no file nothere.csv"),
    ("estimate folder.csv --time date --value rate --model cir", "folder.csv is a folder"),
    ("estimate pipe.csv --time date --value rate --model cir", "pipe.csv is a device or a pipe"),
    ("estimate kept.txt --time date --value rate --model cir", "kept.txt"),
    ("estimate kept.npy --time date --value rate --model cir", "kept.npy"),
    ("estimate empty.csv --time date --value rate --model cir", "empty.csv is empty"),
    ("estimate rates.csv --time day --value rate --model cir", "no column 'day'"),
    ("estimate rates.csv --time date --value price --model cir", "no column 'price'"),
    ("estimate rates.csv --time date --value date --model cir", "are both 'date'"),
    ("estimate rates.csv --time date --value rate --model cir --scale 0", "--scale"),
    ("estimate rates.csv --time date --value rate --model cir --scale nan", "--scale"),
    ("estimate rates.csv --time date --value rate --model cir --measurement-noise -1", "--measurement-noise"),
    ("estimate rates.csv --time date --value rate --model cir --seed y", "--seed"),
    ("estimate rates.csv --time date --value rate --model cir --exact yes", "yes"),
    ("estimate rates.csv --time date --value rate --model cir --json base.rf", "base.rf exists"),
    ("estimate rates.csv --time date --value rate --model cir --json typo/e.json", "there is no folder"),
    ("estimate rates.csv --time date --value rate --model cir --json rates.csv --force", "is also the input"),
    ("estimate rates.csv --time date --value rate --model cir --json folder", "folder is a folder"),
    ("estimate rates.csv --time date --value rate --model cir --out typo/figures", "there is no folder"),
    ("estimate rates.csv --time date --value rate --model cir --out kept.txt", "kept.txt"),
    ("estimate negative.csv --time date --value rate --model cir", "above 0"),
    ("estimate rates.csv --time date --value rate --model jacobi --scale 100", "between 0 and 1"),
    ("estimate still.csv --time date --value rate --model vasicek", "'rate' is always"),
    ("estimate two.csv --time date --value rate --model vasicek", "two.csv has 2 values"),
    ("estimate unsorted.csv --time date --value rate --model vasicek", "unsorted.csv, line 3"),
    ("estimate same.csv --time date --value rate --model vasicek", "same.csv, line 3"),
    ("estimate words.csv --time date --value rate --model vasicek", "'rate' is 'low'"),
    ("estimate undated.csv --time date --value rate --model vasicek", "'date' is 'soon'"),
    ("estimate nodate.csv --time date --value rate --model vasicek", "'date' is empty"),
    ("estimate dashes.csv --time date --value rate --model vasicek", "20240101"),
    ("estimate under.csv --time date --value rate --model vasicek", "'1_000'"),
]

FIGURES = [
    ("demo --seed x", "--seed"),
    ("demo --out typo/figures", "there is no folder"),
    ("demo --out kept.txt", "kept.txt is a file"),
    ("demo banana", "banana"),
    ("reproduce", "fig1"),
    ("reproduce fig9", "fig9"),
    ("reproduce fig1 --steps 0", "--steps"),
    ("reproduce fig1 --steps few", "--steps"),
    ("reproduce fig1 --out typo/figures", "there is no folder"),
    ("reproduce fig1 --out kept.txt", "kept.txt is a file"),
]

TABLE = [*FIT, *SCORE, *SAMPLE, *TUNE, *ESTIMATE, *FIGURES]

TEXTS = {
    "kept.txt": "as it was",
    "kept.npy": "no array",
    "kept.parquet": "no table",
    "empty.csv": "",
    "header.csv": "a,b\n",
    "nonames.csv": "1,2\n3,4\n",
    "twice.csv": "a,a\n1,2\n",
    "unnamed.csv": ",b\n0,1\n1,2\n",
    "text.csv": "a,b\n1,x\n",
    "gap.csv": "a,b\n1,\n",
    "blank.csv": "a,b\n1,   \n",
    "underscore.csv": "a,b\n1,1_000\n",
    "comma.csv": "a,b\n1,2,5\n",
    "short.csv": "a,b\n1\n",
    "nan.csv": "a,b\n1,nan\n",
    "inf.csv": "a,b\n1,inf\n",
    "large.csv": "a,b\n1,1e40\n",
    "complex.csv": "a,b\n1,1+2j\n",
    "dates.csv": "a,b\n1,2024-01-31\n",
    "semicolon.csv": "a;b\n1;2\n",
    "tabs.csv": "a\tb\n1\t2\n",
    "spaces.csv": "a b\n1 2\n",
    "plain.csv.gz": "a,b\n1,2\n",
    "quote.csv": 'a,b\n1,"2\n3,4\n',
    "constant.csv": "a,b\n" + "5,3\n" * 40,
    "one.csv": "a,b\n1,2\n",
    "few.csv": "a,b\n1,2\n2,1\n",
    "other.csv": "x,y\n1,2\n",
    "targets.py": """\
import jax.numpy as jnp

def bell(z): return -0.5 * jnp.sum((z - 3) ** 2)
def two(z): return z[:2]
def second(z): return -(z[1] ** 2)
def pair(z): return z @ jnp.ones(2)
def nowhere(z): return jnp.where(z[0] > 100, 0.0, -jnp.inf)
def complexed(z): return 1j * z[0]

class Half:
    dimension = 1.5
    __call__ = staticmethod(bell)

class Far(Half):
    dimension, start = 2, jnp.zeros(3)

NUMBER, HALF, FAR = 3, Half(), Far()
""",
    "broken.py": "1 / 0\n",
    "lacking.py": "import math; math.nonexistent\n",
    "rates.csv": "date,rate\n"
    + "".join(f"2024-01-{i:02d},{0.1 + 0.01 * (i * i % 7)}\n" for i in range(1, 29)),
    "negative.csv": "date,rate\n0,1\n1,-1\n2,1\n3,2\n",
    "still.csv": "date,rate\n0,1\n1,1\n2,1\n3,1\n",
    "two.csv": "date,rate\n0,1\n1,2\n",
    "unsorted.csv": "date,rate\n1,1\n0,2\n3,1\n",
    "same.csv": "date,rate\n1,1\n1,2\n3,1\n",
    "words.csv": "date,rate\n0,1\n1,low\n2,1\n",
    "undated.csv": "date,rate\n2024-01-01,1\nsoon,2\n2024-01-03,1\n",
    "nodate.csv": "date,rate\n2024-01-01,1\n,2\n2024-01-03,1\n",
    "dashes.csv": "date,rate\n20240101,1\n20240102,2\n20240103,1\n",
    "under.csv": "date,rate\n0,1\n1,1_000\n2,1\n3,2\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files, good and bad."""
    place = tmp_path_factory.mktemp("commands")
    for name, text in TEXTS.items():
        (place / name).write_text(text)
    rows = np.random.default_rng(0).normal(size=(40, 2))
    np.savetxt(place / "table.csv", rows, delimiter=",", header="a,b", comments="")
    (place / "latin.csv").write_bytes("größe,b\n1,2\n".encode("latin-1"))
    (place / "packed.csv").write_bytes(gzip.compress(b"a,b\n1,2\n"))
    (place / "half.csv.gz").write_bytes(gzip.compress(b"a,b\n1,2\n" * 99)[:-12])
    arrays = {"line": rows[:, 0], "three": np.ones((4, 3)), "complex": rows + 1j, "none": rows[:0]}
    arrays |= {"words": np.array([["a", "b"]]), "nan": np.full((2, 2), np.nan)}
    for name, array in arrays.items():
        np.save(place / f"{name}.npy", array)
    np.save(place / "pickle.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    with open(place / "huge.npy", "wb") as file:
        shape = {"descr": "<f8", "fortran_order": False, "shape": (10**11, 2)}
        np.lib.format.write_array_header_2_0(file, shape)
    pa = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(
        pa.table({"a": [1.0, 2.0], "b": ["x", "y"]}), place / "words.parquet"
    )
    (place / "folder").mkdir()
    (place / "folder.csv").mkdir()
    os.mkfifo(place / "pipe.csv")
    (place / "zero.csv").symlink_to("/dev/zero")
    flow = rf.train.velocity_flow(2, width=4, depth=1, key=jax.random.key(0))
    rf.save(place / "model.rf", rf.tables.Standardised(flow, np.zeros(2), np.eye(2), ("a", "b")))
    given = rf.train.velocity_flow(1, width=4, depth=1, num_given=1, key=jax.random.key(0))
    rf.save(place / "given.rf", rf.tables.Standardised(given, np.zeros(2), np.eye(2), ("a", "b"), 1))
    rf.save(place / "base.rf", rf.Normal(jnp.zeros(2)))
    whole = bytearray((place / "model.rf").read_bytes())
    whole[whole.index(b"\x93NUMPY") + 140] ^= 1
    (place / "bit.rf").write_bytes(whole)
    (place / "cut.rf").write_bytes((place / "model.rf").read_bytes()[:-40])
    return place


def contents(folder):
    return {
        str(file): file.read_bytes() if file.is_file() else None
        for file in folder.rglob("*")
        if "__pycache__" not in str(file)
    }


@pytest.mark.parametrize(("command", "words"), TABLE, ids=[row[0] or "nothing" for row in TABLE])
def test_a_bad_command_is_refused_in_one_line(command, words, folder, capsys, monkeypatch):
    from roughflow.cli import main

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = contents(folder)
    try:
        code = main(shlex.split(command))
    finally:
        sys.modules.pop("targets", None)
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.startswith("roughflow: error: ")
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert code == 2
    assert contents(folder) == before


def test_the_table_has_no_row_twice():
    assert len(set(TABLE)) == len(TABLE)


def test_a_column_with_few_digits_gives_one_warning(tmp_path, capsys):
    from roughflow.cli import main

    rows = np.random.default_rng(0).normal(size=(40, 2)) + np.array([0, 1e9])
    np.savetxt(tmp_path / "far.csv", rows, delimiter=",", header="a,b", comments="")
    files = [f"{tmp_path}/far.csv", "--out", f"{tmp_path}/m.rf"]
    with jax.enable_x64(False):
        assert main(["fit", *files, "--family", "gaussian", "--quiet"]) == 0
    assert capsys.readouterr().err.count("warning: column 'b' is 1e+09") == 1


def run(folder, *command, **environment):
    """A command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "roughflow.cli", *command],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_bad_table_is_refused_before_jax_is_imported(folder):
    script = "import sys; from roughflow.cli import main; main(sys.argv[1:]); assert 'jax' not in sys.modules"
    for command in (
        ["fit", "text.csv", "--out", "m.rf"],
        ["estimate", "words.csv", "--time", "date", "--value", "rate", "--model", "cir"],
        ["score", "model.rf", "nothere.csv"],
    ):
        subprocess.run([sys.executable, "-c", script, *command], cwd=folder, check=True, timeout=60)


def test_a_platform_that_is_not_there_is_named(folder):
    done = run(folder, "sample", "model.rf", "-n", "1", JAX_PLATFORMS="cuda")
    if done.returncode == 0:
        pytest.skip("there is a GPU")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "JAX finds no device of the platform 'cuda'" in done.stderr


def test_a_matplotlib_that_does_not_load_is_named(folder, tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise AttributeError('half installed')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run(folder, "fit", "table.csv", "--out", "m.rf", "--report", "r.html", PYTHONPATH=path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "matplotlib, which fails to load here (AttributeError: half installed)" in done.stderr


def test_a_wide_table_is_refused_at_once(tmp_path, capsys):
    """Looking a name up took as long as there are names: minutes for 100,000 of them."""
    from roughflow.cli import main

    wide = tmp_path / "wide.csv"
    wide.write_text(",".join(f"c{i}" for i in range(30_000)) + "\n" + ",".join(["1.5"] * 30_000) + "\n")
    assert main(["fit", str(wide), "--out", str(tmp_path / "m.rf")]) == 2
    assert "wide.csv has 1 row" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no full device to write to")
def test_a_full_disk_is_told_with_the_name_of_the_file(folder, monkeypatch):
    monkeypatch.chdir(folder)

    def write():
        with rf.files.whole_file("new.rf") as draft:
            draft.unlink()
            draft.symlink_to("/dev/full")
            draft.write_text("more than fits")

    with pytest.raises(OSError, match=r"No space left on device: .*new\.rf"):
        write()
    assert not os.path.exists("new.rf")
