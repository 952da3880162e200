"""`roughflow tune`: draws, and that it goes on where it was cut."""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import interrupt_after

import roughflow as rf
from roughflow.cli import main
from roughflow.cli.tune import _start

TARGETS = """\
import jax.numpy as jnp

def bell(z):
    return -0.5 * jnp.sum((z - 3) ** 2)

"""


@pytest.fixture
def targets(tmp_path, monkeypatch):
    """A module of targets in the current folder."""
    (tmp_path / "targets.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("targets", None)


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


def test_random_starting_points_outside_the_support_are_drawn_again():
    half_line = lambda z: jnp.where(z[0] > 0, -z[0], -jnp.inf)
    options = argparse.Namespace(target="half_line", dimension=1, chains=64)
    start = _start(half_line, options, jax.random.key(0))
    assert start.shape == (64, 1)
    assert np.all(start > 0)
