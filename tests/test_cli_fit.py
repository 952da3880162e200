"""`roughflow fit`: what it says, what it refuses, and that it goes on where it was cut."""

import csv
import os
import re

import jax
import numpy as np
import pytest
from commands import TINY, interrupt_after, table, write

import roughflow as rf
from roughflow.cli import main


def test_fit_reports_the_gaussian_it_started_from(fitted):
    """After two small steps the model is still near the normal distribution, in the units of the data."""
    said = (fitted / "said.txt").read_text()
    assert "rows        200: 180 to train on, 20 to validate on" in said
    assert "columns     c, a" in said
    assert "regression  2 steps\nlikelihood  2 steps\n" in said
    assert f"model       {fitted}/new/model.rf" in said
    assert "family      flow" in said
    score, error, count, gaussian = scores(said)
    assert score == pytest.approx(gaussian, abs=1e-2)
    assert 0.05 < error < 1
    assert count == 20
    # Of a normal distribution with standard deviation 2 in two dimensions.
    assert gaussian == pytest.approx(-(np.log(2 * np.pi) + 1 + 2 * np.log(2)), abs=0.7)


def scores(said):
    """The score that a fit prints, its standard error, how many rows it is of, and the Gaussian's."""
    pattern = r"score +(\S+) ± (\S+) nats per row \([\w -]+, (\d+) rows\)\nGaussian +(\S+), gain"
    return [float(word) for word in re.search(pattern, said).groups()]


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
    assert given["noise"] == "best"
    assert given["flow"] == rf.tables.FlowOptions(outliers=0.1, marginals=False)


def test_a_warning_names_the_options_of_the_command_line(tmp_path, capsys):
    write(tmp_path / "data.csv", ["a", "b"], [[i % 3, i**1.5] for i in range(30)])
    options = [*TINY, "--likelihood-steps", "0"]
    assert main(["fit", f"{tmp_path}/data.csv", "--out", f"{tmp_path}/m.rf", *options]) == 0
    said = capsys.readouterr().err
    assert "column 'a' holds rounded values (in steps of 1), where a density may grow without bound" in said
    assert "pass --rounding auto, or condition on them (--given) (see faq: rounded-values)" in said


def test_a_small_table_gets_a_gaussian(tmp_path, capsys):
    """By default; rows of one group are validated together, and rounded values are spread."""
    rng = np.random.default_rng(0)
    visit = np.arange(40) // 8
    rows = np.column_stack([rng.normal(170, 10, 40).round(), visit + 0.1 * rng.normal(size=40), visit])
    write(tmp_path / "data.csv", ["height", "b", "visit"], rows)
    command = ["fit", f"{tmp_path}/data.csv", "--groups", "visit", "--out"]
    assert main([*command, f"{tmp_path}/m.rf", "--rounding", "auto", "--quiet"]) == 0
    said, warned = capsys.readouterr()
    assert not warned
    assert "rows        40\ncolumns     height, b\n" in said
    assert "regression  0 steps; ended before the first step: no flow was trained\n" in said
    assert "family      gaussian" in said
    assert scores(said)[2] == 40
    # A value of b says that of its visit: rows of other visits know less of it.
    alone = ["fit", f"{tmp_path}/data.csv", "--columns", "height,b", "--rounding", "auto", "--out"]
    assert main([*alone, f"{tmp_path}/o.rf", "--family", "gaussian", "--quiet"]) == 0
    assert scores(capsys.readouterr().out)[0] > scores(said)[0] + 0.05
    assert rf.load(tmp_path / "m.rf").columns == ("height", "b")
    assert main([*command, f"{tmp_path}/n.rf", "--family", "marginals", "--quiet"]) == 0
    said, warned = capsys.readouterr()
    assert "family      marginals" in said
    assert "column 'height' holds rounded values (in steps of 1)" in warned


def test_two_fits_at_once_do_not_share_a_file(refused, tmp_path):
    table(tmp_path / "data.csv")
    with rf.files.file_lock(tmp_path / "m.rf", "busy"):
        assert "another run is writing m.rf: wait" in refused("fit", "data.csv", "--out", "m.rf", *TINY)
    with rf.files.file_lock(tmp_path / "n.rf.checkpoint", "busy"):
        assert "is in use by another run" in refused("fit", "data.csv", "--out", "n.rf", *TINY)
    assert main(["fit", "data.csv", "--out", "m.rf", *TINY]) == 0
    assert sorted(os.listdir()) == ["data.csv", "m.rf"]


def test_relations_are_printed(tmp_path, monkeypatch, capsys):
    """A constant and a dependent column take part in scores and samples."""
    monkeypatch.chdir(tmp_path)
    noise = np.random.default_rng(0).normal(size=(40, 2)).round(6)
    write(tmp_path / "line.csv", ["a", "b", "c", "d"], [[x, y, 2 * x + y, 7] for x, y in noise])
    assert main(["fit", "line.csv", "--out", "m.rf", "--family", "gaussian", "--quiet"]) == 0
    assert "relation    c = 2 a + 1 b" in (shown := capsys.readouterr().out)
    assert "d = 7" in shown
    assert main(["sample", "m.rf", "-n", "5", "--out", "new.csv"]) == 0
    assert main(["score", "m.rf", "new.csv", "--quiet"]) == 0
    assert "mean log_prob -" in (told := capsys.readouterr().err)
    assert "inf" not in told


def test_stop_and_resume(refused, tmp_path, capsys, monkeypatch):
    table(tmp_path / "data.csv")
    command = ["fit", "data.csv", "--out", "model.rf", *TINY, "--steps", "6"]
    assert "no checkpoint model.rf.checkpoint to resume" in refused(*command, "--resume")
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

    assert "use --resume to continue it, or --force to start again" in refused(*command)
    others = [("seed", 0, 1), ("validation", 0.1, 0.2), ("steps", 6, 7), ("noise", 0.0, 0.5), ("width", 4, 5)]
    for option, before, now in others:
        said = refused(*command, "--resume", f"--{option}", now)
        assert f"holds a run with --{option} {before}, not with --{option} {now}:" in said
    assert "a run without --rounding, not with" in refused(*command, "--resume", "--rounding", "a=1")
    good = (tmp_path / "data.csv").read_text()
    table(tmp_path / "data.csv", seed=1)
    assert "another run: data" in refused(*command, "--resume")
    (tmp_path / "data.csv").write_text(good)

    assert main([*command, "--resume"]) == 0
    assert sorted(os.listdir()) == ["data.csv", "model.rf", "whole.rf"]
    same = jax.tree.map(np.array_equal, *(rf.load(tmp_path / name) for name in ("model.rf", "whole.rf")))
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_a_noisy_fit_scores_better_than_the_gaussian(tmp_path, capsys):
    """The whole way, with the default noise: two well separated lumps are no Gaussian."""
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.normal(-3, 0.5, (300, 1)), rng.normal(3, 0.5, (300, 1))]) * 10 + 500
    write(tmp_path / "lumps.csv", ["height"], rows)
    command = ["fit", f"{tmp_path}/lumps.csv", "--out", f"{tmp_path}/m.rf", "--steps", "150", "--quiet"]
    assert main([*command, "--width", "16", "--depth", "2"]) == 0
    score, _, _, gaussian = scores(capsys.readouterr().out)
    assert score > gaussian + 0.3
    write(tmp_path / "some.csv", ["height"], rows[::10])
    assert main(["score", f"{tmp_path}/m.rf", f"{tmp_path}/some.csv", "--tolerance", "0.05"]) == 0
    _, *values = csv.reader(capsys.readouterr().out.splitlines())
    values = np.array(values, float)
    assert np.mean(values[:, 0]) == pytest.approx(score, abs=0.3)
    assert np.mean(values[:, 1] < 0.05) > 0.95
