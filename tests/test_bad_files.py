"""Nothing in a file is executed, bad ones are refused in one line, and none is ever half there."""

import importlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from saved import flow_of, rewritten

import roughflow as rf


def test_a_function_cannot_be_saved_and_leaves_the_old_file(key, tmp_path):
    file = tmp_path / "flow.rf"
    file.write_text("old")
    with pytest.raises(
        ValueError, match=r"^model.sde.drift cannot be saved: it is .*<lambda>; make it an eqx.Module"
    ):
        rf.save(file, flow_of(key, lambda t, z: -z))
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["flow.rf"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("os:system", r"^the file contains an object of os\.system: pass"),
        ("subprocess:Popen", r"^the file contains an object of subprocess\.Popen: pass"),
        ("roughflow:fit", r"^the file refers to roughflow:fit, which is not a part of a model"),
        ("equinox:filter_jit", r"^the file refers to equinox:filter_jit, which is not a part of a model"),
        ("roughflow.files:importlib.import_module", r"which is not a part of a model"),
        ("roughflow:files.read_archive", r"which is not a part of a model"),
        ("roughflow:plots", r"which the installed roughflow lacks"),
        ("roughflow.cli.__main__:Exit", r"which the installed roughflow lacks"),
        ("roughflow.experiments._run:Trained", r"which the installed roughflow lacks"),
        ("roughflow:AbstractDriver", r"is damaged: TypeError Can't instantiate abstract class"),
        ("roughflow:Nothing", r"^the file holds roughflow:Nothing, which the installed roughflow lacks"),
    ],
)
def test_a_file_runs_nothing(key, tmp_path, name, message):
    """Whatever class or function a file names, only modules are built, and none is called."""
    file = tmp_path / "flow.rf"
    rf.save(file, rf.Normal(jnp.zeros(1)))
    rewritten(file, lambda header: header["structure"].update(module=name))
    importlib.import_module("roughflow._public")  # all that a name of roughflow's may bring
    before = set(sys.modules)
    with pytest.raises(ValueError, match=message):
        rf.load(file)
    assert not [module for module in set(sys.modules) - before if module.startswith("roughflow")]


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path):
    """A zip bomb: 80 megabytes of zeros in a few dozen kilobytes."""
    file = tmp_path / "bomb.rf"
    rf.save(file, rf.Normal(jnp.zeros(1)))
    with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("array/9.npy", bytes(80_000_000))
    with pytest.raises(ValueError, match=r"damaged \(\d+ bytes that unpack to 80\d+\)"):
        rf.load(file)


def test_an_array_larger_than_its_bytes_is_refused(tmp_path):
    file = tmp_path / "base.rf"
    rf.save(file, rf.Normal(jnp.zeros(1)))
    head = np.lib.format.magic(1, 0) + b"\x76\x00"
    text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (900000000000000,), }".ljust(117) + b"\n"
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("array/9.npy", head + text)
    with pytest.raises(ValueError, match=r"is not a roughflow model, or is damaged"):
        rf.load(file)


@pytest.mark.parametrize("depth", [120, 3000, 100_000])
def test_a_file_that_nests_without_end_is_refused(depth, tmp_path):
    file = tmp_path / "deep.rf"
    structure = '{"list":[' * depth + "null" + "]}" * depth
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("header.json", f'{{"kind":"model","version":1,"structure":{structure}}}')
    with pytest.raises(ValueError, match=r"is damaged: .*nested"):
        rf.load(file)


def test_a_model_that_nests_without_end_is_not_saved(tmp_path):
    model = None
    for _ in range(500):
        model = [model]
    with pytest.raises(ValueError, match=r"nested more than 100 levels deep"):
        rf.save(tmp_path / "m.rf", model)


def fields_of(header, *names):
    part = header["structure"]
    for name in names:
        part = part["fields"][name]
    return part["fields"]


DAMAGE = {
    "text for an array": lambda h: fields_of(h, "base").update(loc="haha"),
    "a module for a number": lambda h: fields_of(h).update(t1=fields_of(h)["base"]),
    "nothing for a module": lambda h: fields_of(h).update(driver=None),
    "a number for a module": lambda h: fields_of(h).update(integrator=3),
    "another kind of module": lambda h: fields_of(h).update(driver=fields_of(h)["integrator"]),
    "a number for a function": lambda h: fields_of(h, "sde", "drift").update(activation=1.0),
    "text for a whole number": lambda h: fields_of(h).update(noise_dimension="2"),
    "an array that is static": lambda h: fields_of(h, "sde", "diffusion").update(scale={"array": "array/0"}),
    "a list for a tuple": lambda h: fields_of(h, "sde", "drift").update(weights={"list": []}),
    "a tuple of text": lambda h: fields_of(h, "sde", "drift").update(weights={"tuple": ["a", "b"]}),
    "one array for another": lambda h: fields_of(h, "base").update(loc={"array": "array/0"}),
    "weights that do not fit": lambda h: fields_of(h, "sde", "drift")["weights"]["tuple"].reverse(),
    "too few layers": lambda h: [
        fields_of(h, "sde", "drift")[n]["tuple"].pop() for n in ("weights", "biases")
    ],
    "another dimension": lambda h: fields_of(h).update(dimension=3),
    "no such array": lambda h: fields_of(h, "base").update(loc={"array": "array/99"}),
    "no such function": lambda h: fields_of(h, "sde", "drift").update(activation={"function": "exec"}),
    "no such dtype": lambda h: fields_of(h, "base").update(loc={"array": "array/0", "dtype": "object"}),
    "a bare list": lambda h: fields_of(h, "base").update(loc=[1.0, 2.0]),
    "no fields": lambda h: h["structure"].update(fields=None),
    "no structure": lambda h: h.pop("structure"),
}


def test_parts_that_cannot_belong_together_are_refused(key, tmp_path):
    file = tmp_path / "flow.rf"
    rf.save(file, flow_of(key))
    whole = file.read_bytes()
    for name, damage in DAMAGE.items():
        file.write_bytes(whole)
        rewritten(file, damage)
        with pytest.raises(ValueError) as error:  # noqa: PT011
            rf.load(file)
        assert re.search(r"flow.rf is damaged: [^\n]+$", str(error.value)), name


def test_pickles_are_refused(tmp_path):
    """An array of objects is a pickle in disguise."""
    file, bomb = tmp_path / "flow.rf", tmp_path / "bomb.npy"
    rf.save(file, rf.Normal(jnp.zeros(1)))
    np.save(bomb, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with zipfile.ZipFile(file, "a") as archive:
        archive.write(bomb, "array/9.npy")
    with pytest.raises(ValueError, match=r"is not a roughflow model, or is damaged"):
        rf.load(file)


def test_wrong_files_get_one_line(key, tmp_path):
    file = tmp_path / "flow.rf"
    with pytest.raises(FileNotFoundError, match=r"^there is no file"):
        rf.load(file)
    file.write_text("not a model")
    with pytest.raises(ValueError, match=r"is not a roughflow model, or is damaged"):
        rf.load(file)
    rf.save(file, rf.Normal(jnp.zeros(1)))
    rewritten(file, lambda header: header.update(version=99))
    with pytest.raises(ValueError, match=r"was written by a later roughflow \(format 99"):
        rf.load(file)
    rf.save(file, rf.Normal(jnp.zeros(1)))
    rewritten(file, lambda header: header["structure"]["fields"].pop("loc"))
    with pytest.raises(ValueError, match=r"is damaged: .*loc is missing"):
        rf.load(file)


def test_ctrl_c_waits_until_a_file_is_written(tmp_path, key, monkeypatch):
    """Half an archive could not even be closed."""
    writestr = zipfile.ZipFile.writestr

    def pressed(archive, name, data):
        writestr(archive, name, data)
        if name.filename == "header.json":
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(zipfile.ZipFile, "writestr", pressed)
    # A shell that runs the tests in the background has them ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            rf.save(tmp_path / "flow.rf", flow_of(key))
    finally:
        signal.signal(signal.SIGINT, before)
    assert rf.load(tmp_path / "flow.rf").dimension == 2


def test_files_are_written_through_links_and_not_over_pipes(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    rf.save(tmp_path / "link", rf.Normal(jnp.zeros(2)))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").is_file()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="a device or a pipe, not a file to write"):
        rf.save(tmp_path / "pipe", rf.Normal(jnp.zeros(2)))


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    """A process that saves one model after another is killed, again and again; each is a copy of one that has
    imported what it needs."""
    file = tmp_path / "model.rf"
    script = textwrap.dedent(f"""
        import itertools, os, sys
        import numpy as np
        from roughflow.files import write_archive
        for _ in sys.stdin:
            writer = os.fork()
            if writer == 0:
                for i in itertools.count(1):
                    header = {{"kind": "model", "version": 1, "i": i}}
                    write_archive({str(file)!r}, header, {{"a": np.full(300_000, i)}})
            print(writer, flush=True)
            os.waitpid(writer, 0)
            print("killed", flush=True)
    """)
    from roughflow.files import read_archive

    seen, rng = set(), np.random.default_rng(0)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(4):
            print("another", file=process.stdin, flush=True)
            writer = int(process.stdout.readline())
            while not file.exists():
                time.sleep(0.01)
            time.sleep(rng.uniform(0.02, 0.2))
            os.kill(writer, signal.SIGKILL)
            assert process.stdout.readline() == "killed\n"
            header, arrays = read_archive(file, "model", 1)
            assert np.all(arrays["a"] == header["i"])
            seen.add(header["i"])
    assert len(seen) > 1
