"""`roughflow score` and `roughflow sample`: what a model says of rows, and rows it makes."""

import os
import shlex
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import read

import roughflow as rf
from roughflow.cli import main


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


def test_many_samples_are_drawn_in_blocks(fitted, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["roughflow.cli.sample"], "CHUNK_ROWS", 4)
    command = ["sample", f"{fitted}/model.rf", "-n", "10", "--out"]
    assert main([*command, f"{tmp_path}/s.csv"]) == main([*command, f"{tmp_path}/s.npy"]) == 0
    rows = np.load(tmp_path / "s.npy")
    assert rows.shape == (10, 2)
    assert len(np.unique(rows[:, 0])) == 10
    np.testing.assert_array_equal(read(tmp_path / "s.csv")[1].astype(rows.dtype), rows)


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

        monkeypatch.setattr(rf.tables, "estimate_chunks", chunks)

    estimate_chunks = rf.tables.estimate_chunks
    return after


def test_a_command_that_is_terminated_leaves_no_draft(fitted, tmp_path, capsys, monkeypatch, terminated):
    before = signal.getsignal(signal.SIGTERM)
    terminated(0)
    monkeypatch.chdir(tmp_path)
    command = ["score", f"{fitted}/model.rf", f"{fitted}/data.csv", "--out", "scores.csv", "--quiet"]
    assert main(command) == 143
    told = "stopped at row 0 of 200 before anything was saved"
    assert capsys.readouterr().err == f"roughflow: {told}\n"
    assert os.listdir() == []
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ["scores.csv", "scores.tsv.gz"])
def test_scores_that_were_cut_short_go_on(fitted, tmp_path, capsys, monkeypatch, terminated, refused, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("roughflow.cli.score.CHUNK_ROWS", 64)
    score = ["score", f"{fitted}/model.rf", f"{fitted}/data.csv", "--quiet"]
    command = [*score, "--out", name]
    assert main([*score, "--out", f"whole-{name}"]) == 0
    said = capsys.readouterr().err
    terminated(2)
    assert main(command) == 143
    again = shlex.join(["roughflow", *command, "--resume"])
    told = f"stopped at row 128 of 200, saved in {name}.checkpoint; continue with: {again}"
    assert capsys.readouterr().err == f"roughflow: {told}\n"

    assert "holds an interrupted run" in refused(*command)
    assert "with --seed 0, not with --seed 1" in refused(*command, "--resume", "--seed", "1")
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
    assert "--resume needs an output file" in refused(*score, "--resume")
