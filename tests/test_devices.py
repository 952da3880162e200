"""Fits on several devices and in several processes, and of tables on disk: the numbers are those of one."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import devices
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fits import fit_density, grouped
from jax.sharding import AbstractMesh, AxisType

import roughflow as rf
from roughflow._devices import Devices, by_rows
from roughflow.cli import main, tables as cli_table
from roughflow.train._data import rng_of

PROGRAM = Path(__file__).parent / "devices.py"
MESH = AbstractMesh((2,), ("rows",), axis_types=(AxisType.Auto,))


def start(out, settings, devices, *process):
    """`devices.py` in a process of its own, with simulated devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    command = [sys.executable, str(PROGRAM), str(out), json.dumps(settings), *map(str, process)]
    path = f"{PROGRAM.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": path}
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def done(process):
    said = process.communicate()[1]
    assert process.returncode == 0, said


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path_factory.mktemp("rows") / "rows.parquet"
    x, y = np.random.default_rng(0).normal(size=(2, 1000))
    pq.write_table(pa.table({"x": x, "y": x**2 + y}), file, row_group_size=300)
    return file


def numbers_of(runs, folder):
    """The numbers of runs on up to four devices. One process does them all: what one of them compiles, the
    next one on as many devices finds compiled."""
    done(start(folder / "all.npz", runs, 4))
    return dict(np.load(folder / "all.npz"))


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", [False, True])
def test_the_same_parameters_on_several_devices(likelihood, tmp_path):
    """With `make test` on two, of two processes."""
    settings = {"steps": 12, "likelihood": likelihood}
    runs = numbers_of([settings | {"name": str(n), "devices": n} for n in (2, 4)], tmp_path)
    for found in (runs["2"], runs["4"]):
        np.testing.assert_allclose(found, devices.numbers_of(**settings), rtol=1e-9, atol=1e-12)


def test_a_likelihood_is_split_between_devices():
    """Each device solves for its own half of the 30 rows, with two paths each."""
    solved, key = [], jax.random.key(0)

    class Recorded(rf.FixedGrid):
        def integrate(self, field, z, fraction, *, reverse):
            solved.append(len(z))
            return super().integrate(field, z, fraction, reverse=reverse)

    flow = rf.neural_flow(2, 8, 1, key=key)
    flow = eqx.tree_at(lambda flow: flow.integrator, flow, Recorded(steps=2))

    def loss(flow, mesh):
        with Devices(mesh).at_work(flow):
            return rf.MaximumLikelihood(2, rf.Prior())(flow, jnp.ones((30, 2)), key=key)[0]

    for mesh, paths in ((None, 60), (MESH, 30)):
        solved.clear()
        eqx.filter_eval_shape(loss, flow, mesh)
        assert set(solved) == {paths}


def test_devices_add_up_the_derivatives_that_are_wanted_and_once():
    """15 weights and 5 biases in one sum; a matrix that is not trained has no derivative at all."""
    fixed, x = jnp.ones((5, 5)), jnp.ones((4, 3))
    value = lambda shared, x: jnp.sin(jnp.cos(x @ shared[0]["w"] + shared[0]["b"][None]) @ shared[1])

    def loss(trained):
        with Devices(MESH).at_work(trained):  # pyright: ignore[reportArgumentType]
            return jnp.sum(by_rows(value, (trained, fixed), x))

    program = str(jax.make_jaxpr(jax.grad(loss))({"w": jnp.ones((3, 5)), "b": jnp.ones(5)}))
    assert re.findall(r"f64\[([\d,]*)\] = psum\[", program) == ["20"]


def test_a_mesh_as_jax_makes_it_will_do():
    x = jnp.arange(4.0)
    devices = Devices.of(jax.make_mesh((1,), ("rows",)))
    np.testing.assert_array_equal(jax.jit(devices.split)(devices.put_rows(np.asarray(x), axis=0)), x)


def test_no_array_without_entries_goes_between_devices():
    """JAX 0.11's compiler crashes of one: a velocity without waves has them."""
    velocity = rf.sde.VelocityNetwork(2, 8, 1, num_features=0, key=jax.random.key(0))
    assert velocity.waves.size == 0
    moved = lambda velocity, t, z: jax.vmap(velocity)(t, z)

    def loss(velocity):
        with Devices(MESH).at_work(velocity.network):  # pyright: ignore[reportArgumentType]
            return jnp.sum(by_rows(moved, velocity, jnp.ones(4), jnp.ones((4, 2))) ** 2)

    (split,) = [e for e in jax.make_jaxpr(loss)(velocity).eqns if e.primitive.name == "shard_map"]
    assert all(variable.aval.size for variable in split.invars)
    program = str(jax.make_jaxpr(jax.grad(lambda z: jnp.sum(velocity(jnp.ones(()), z))))(jnp.ones(2)))
    assert not re.search(r"f64\[(\d+,)?0\]", program)


# A command whose fit says how many devices there are, and ends.
COUNTING = """
import sys, jax, roughflow as rf
from roughflow.cli import main
def fit(data, *, run, **rest): sys.exit(f"{run.devices} of {jax.device_count()}")
rf.fit_density = fit
main(sys.argv[1:])
"""


@pytest.mark.parametrize("program", [COUNTING, pytest.param(None, marks=pytest.mark.slow)])
def test_a_command_makes_devices_of_a_cpu(program, tmp_path):
    table, model = tmp_path / "rows.csv", tmp_path / "model.rf"
    np.savetxt(table, np.random.default_rng(0).normal(size=(60, 2)), delimiter=",", header="x,y", comments="")
    small = ["--steps", "2", "--likelihood-steps", "0", "--width", "4", "--batch-size", "32", "--quiet"]
    python = [sys.executable, *(["-m", "roughflow.cli"] if program is None else ["-c", program])]
    command = [*python, "fit", str(table), "--out", str(model), *small, "--devices", "2"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if program is None:
        assert run.returncode == 0, run.stderr
        assert model.exists()
    else:
        assert run.stderr == "2 of 2\n"


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_devices(tmp_path):
    """With `make test` one from disk does, on a mesh."""
    long = {"steps": 400, "checkpoint": str(tmp_path / "run")}
    cut = long | {"name": "cut", "cut": True}
    on = long | {"name": "on", "devices": 4, "resume": True}
    runs = numbers_of([cut, on, {"name": "whole", "steps": 400}], tmp_path)
    assert runs["cut"].size < runs["on"].size
    np.testing.assert_allclose(runs["on"], runs["whole"], rtol=1e-7, atol=1e-9)


def test_two_processes_fit_as_one(tmp_path):
    port = free_port()
    settings = [{"name": "all", "steps": 12, "checkpoint": str(tmp_path / "run")}]
    outs = [tmp_path / f"{i}.npz" for i in range(2)]
    processes = [start(out, settings, 1, port, i) for i, out in enumerate(outs)]
    alone = devices.numbers_of(steps=12)
    for process in processes:
        done(process)
    for out in outs:
        found = np.load(out)
        np.testing.assert_allclose(found["all"], alone, rtol=1e-9, atol=1e-12)
        # No thread displaces the one that it waits for; one may have been born while they were counted.
        assert np.mean(found["policies"] == getattr(os, "SCHED_BATCH", 0)) > 0.9
    assert (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_that_joined_end_in_good_order(tmp_path):
    """One that is killed ends the other with a line and leaves a checkpoint; bad input has its exit code."""
    table, model = tmp_path / "rows.csv", tmp_path / "model.rf"
    np.savetxt(table, np.random.default_rng(0).normal(size=(60, 2)), delimiter=",", header="x,y", comments="")
    checkpoint = model.with_name("model.rf.checkpoint")
    fit = ["fit", str(table), "--out", str(model), "--steps", "10000000", "--likelihood-steps", "0"]

    def joined():
        port = free_port()
        for i in range(2):
            command = [
                sys.executable,
                "-m",
                "roughflow.cli",
                *fit,
                "--width",
                "4",
                "--patience",
                "0",
                "--quiet",
            ]
            command += ["--join", f"localhost:{port},{i},2"]
            yield subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    first, second = joined()
    while not checkpoint.exists() and first.poll() is None:
        time.sleep(0.1)
    second.kill()
    assert "process of this run ended" in first.communicate(timeout=60)[1]
    assert first.returncode == 1
    assert checkpoint.exists()
    model.touch()
    first, second = joined()
    assert "exists: --force overwrites it" in first.communicate(timeout=60)[1]
    assert first.returncode == 2
    second.communicate(timeout=60)


def flow_and_settings(file, devices=None, **more):
    flow = rf.train.velocity_flow(2, width=8, depth=1, key=jax.random.key(0))
    settings = {"objective": rf.Interpolant(), "batch_size": 30, "validate_every": 5, "validation": 0.1}
    settings |= {"key": jax.random.key(1), "progress": False, "steps": 12, "devices": devices}
    return rf.fit(flow, rf.tables.ParquetTable(file), **grouped(settings | more))


def numbers(fitted):
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(fitted.model) if hasattr(leaf, "dtype")]
    return np.concatenate([*leaves, fitted.history.loss])


def test_a_run_from_disk_goes_on_where_it_was_cut(rows, tmp_path, interrupt_when_written):
    whole = flow_and_settings(rows, steps=200)
    file = tmp_path / "run"
    with interrupt_when_written(file):
        cut = flow_and_settings(rows, steps=200, checkpoint=file)
    # On a mesh, too: how many devices there are is no part of the run.
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("any",))
    resumed = flow_and_settings(rows, devices=mesh, steps=200, checkpoint=file, resume=True)
    assert cut.history.loss.size <= 200 == resumed.history.loss.size
    np.testing.assert_allclose(numbers(resumed), numbers(whole), rtol=1e-12)


def test_batches_go_by_the_key_and_leave_out_what_is_set_aside(rows):
    table = rf.tables.ParquetTable(rows, ["y"], given=["x"])
    assert (table.columns, table.num_given, table.shape) == (("y", "x"), 1, (1000, 2))
    rest, aside = table.split(0.2, key=jax.random.key(0))
    drawn = lambda seed: rest.batch(4000, np.random.default_rng(seed))
    np.testing.assert_array_equal(drawn(0), drawn(0))
    assert len(rest) == 800
    assert len(aside) == 200
    assert {row.tobytes() for row in drawn(1)}.isdisjoint({row.tobytes() for row in aside})
    steps = [rest.batch(9, rng_of(jax.random.key(0), step)) for step in (0, 1, 0)]
    np.testing.assert_array_equal(steps[0], steps[2])
    assert np.any(steps[0] != steps[1])
    every = rest.subsample(10**6, np.random.default_rng(0))
    assert len({row.tobytes() for row in (*every, *aside)}) == 1000


def test_a_density_from_disk_is_that_from_memory(rows):
    settings = {"key": jax.random.key(0), "width": 16, "depth": 1, "steps": 100, "likelihood_steps": 0}
    table = rf.tables.ParquetTable(rows)
    settings |= {"progress": False, "rounding": {"x": 0.01}, "bounds": {"y": (-10, None)}}
    in_memory = {"data": table.subsample(1000, np.random.default_rng(0)), "columns": table.columns}
    fits = [fit_density(**data, **settings) for data in ({"data": table}, in_memory)]
    (one, two), (same, _) = [[fit.history.validation_loss[i] for fit in fits] for i in (-1, 0)]
    assert one == pytest.approx(two, abs=0.2)
    assert one < same
    with pytest.raises(ValueError, match="not strictly between its bounds"):
        fit_density(table, **(settings | {"bounds": {"y": (0, None)}}))


def test_what_cannot_be_read_is_named(rows, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1.0, None], "b": ["x", "y"]}), tmp_path / "odd.parquet")
    wrong = {"a": "row 2 has nan in column 'a'", "b": "holds string", "c": "it has a, b"}
    for column, told in wrong.items():
        with pytest.raises(ValueError, match=told):
            rf.tables.ParquetTable(tmp_path / "odd.parquet", [column])
    with pytest.raises(ValueError, match="devices must be between 1 and"):
        flow_and_settings(rows, devices=64)


def test_the_command_line_streams_large_files(rows, tmp_path, monkeypatch, capsys):
    """The same scores, whether a file is read at once or as it goes, and on however many devices."""
    fit = ["fit", str(rows), "--steps", "10", "--likelihood-steps", "0", "--width", "8", "--depth", "1"]
    x = rf.tables.ParquetTable(rows).subsample(1000, np.random.default_rng(0))
    np.savetxt(tmp_path / "rows.csv", x, delimiter=",", header="x,y", comments="", fmt="%.17g")
    np.save(tmp_path / "rows.npy", x)
    assert main([*fit, "--quiet", "--out", str(tmp_path / "memory.rf")]) == 0
    score = lambda data, *more: main(["score", str(tmp_path / "memory.rf"), str(data), "--quiet", *more])
    monkeypatch.setattr("roughflow.cli.score.CHUNK_ROWS", 256)
    files = [rows, tmp_path / "rows.csv", tmp_path / "rows.npy"]
    capsys.readouterr()
    assert score(rows) == 0
    expected = capsys.readouterr()
    monkeypatch.setattr(cli_table, "LARGE_FILE", 0)
    assert main([*fit, "--quiet", "--out", str(tmp_path / "disk.rf")]) == 0
    assert "1000: 900 to train on, 100 to validate on" in capsys.readouterr().out
    for file in files:
        assert score(file, "--devices", "1") == 0
        assert capsys.readouterr() == expected


def test_chunks_on_several_devices(key, monkeypatch):
    """Chunks in their order, each with random numbers of its own, whichever thread works on them."""
    flow = rf.neural_flow(2, noise=0.3, width=4, depth=1, key=key)
    points = np.random.default_rng(0).normal(size=(5, 8, 2))
    settings = {"key": key, "estimator": rf.PullBack(4)}
    plain = list(rf.tables.estimate_chunks(flow, points, **settings))
    last = lambda: next(rf.tables.estimate_chunks(flow, points[4:], first=4, **settings))
    np.testing.assert_array_equal(last().log_prob, plain[4].log_prob)
    monkeypatch.setattr("roughflow._devices.Devices.own", jax.devices()[:1] * 2)
    np.testing.assert_array_equal(last().log_prob, plain[4].log_prob)
    for one, two in zip(plain, rf.tables.estimate_chunks(flow, points, **settings), strict=True):
        np.testing.assert_array_equal(one.log_prob, two.log_prob)
    assert (
        np.ptp([part.log_prob[0] for part in rf.tables.estimate_chunks(flow, points[[0, 0]], **settings)]) > 0
    )
