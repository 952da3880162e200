"""`roughflow tune`: bad targets, draws, and that it goes on where it was cut."""

import sys

import jax
import numpy as np
import pytest
from commands import interrupt_after

import roughflow as rf
from roughflow.cli import main

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
    assert "'targets' is not of the form MODULE:FUNCTION" in tune("targets")
    assert "there is no module nowhere" in tune("nowhere:f")
    assert "the module targets has no f" in tune("targets:f")
    assert "importing broken failed: ZeroDivisionError" in tune("broken:f")
    assert "targets:NUMBER is a int, not a function" in tune("targets:NUMBER")
    assert "must return one number for z, got shape (1,)" in tune("targets:two")
    assert "targets:pair fails for z of shape (1,); it must be written with jax.numpy" in tune("targets:pair")
    assert "--gradients must be at least" in tune("targets:bell", "--gradients", "10")
    assert "--noise-out d.csv is also another output" in tune("targets:bell", "--noise-out", "d.csv")
    assert "index 1 is out of bounds" in tune("targets:second")
    assert "not finite where the chains start, around [0.0]" in tune("targets:nowhere")
    assert "importing lacking failed: AttributeError" in tune("lacking:f")
    assert "its dimension must be a whole number" in refused("tune", "targets:HALF", "--out", "d.csv")
    assert "has no dimension: set --dimension" in refused("tune", "targets:bell", "--out", "d.csv")
    assert "the draws must end in" in refused("tune", "targets:bell", "--out", "d.txt")


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
