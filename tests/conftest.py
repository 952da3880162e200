"""Tests run in float64 with implicit rank promotion an error; float32 is asked for where it is meant."""

import contextlib
import functools
import gc
import io
import os
import signal
import threading
import time
from importlib.metadata import version
from pathlib import Path

# Most of a run is compiling small programs that run once; examples in subprocesses inherit this. Without
# optimisation, and with XLA's older way to fuse loops, that takes a third of the time.
# JAX 0.11 has another name for that, and ends the process of a flag that it does not know.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    + (
        "--xla_cpu_use_fusion_emitters=false "
        if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)
        else "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    )
    + "--xla_cpu_parallel_codegen_split_count=1 --xla_disable_hlo_passes=while-loop-invariant-code-motion",
)
# With a process for each core, threads of NumPy's would wait for each other.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# No program is kept on disk, by subprocesses neither: without optimisation, writing one takes as long as
# compiling it, and reading it longer. The folder keeps commands from that of the user.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache/programs"))

import jax
import pytest
from jax._src.interpreters import mlir

# Tracing makes millions of small objects, hardly any of them garbage: look for it less often.
gc.set_threshold(100_000, 20, 50)
# Nor does the garbage collector visit what the imports made, again and again.
gc.freeze()

# Programs can share the context that they are lowered in: a new one takes 5 of the 20 ms of a tiny program.
if hasattr(mlir, "make_ir_context"):
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True, scope="module")
def programs_of_many_files():
    """Drop compiled programs once they are many: the memory maps of a process would not do for those of all
    tests, and its compiler die of it. Until then a file finds the small ones of those before it compiled."""
    yield
    maps = Path("/proc/self/maps")
    count = lambda: maps.read_bytes().count(b"\n") if maps.exists() else 0
    if count() < 40_000:  # of 65,530; a file adds a few thousand, and dropping them takes seconds
        return
    from roughflow import _programs

    _programs.drop_programs()
    jax.clear_caches()
    gc.collect()
    assert count() < 20_000, "something holds on to programs: they would add up, file by file"


@pytest.fixture
def key():
    return jax.random.key(20)


@pytest.fixture
def interrupt_when_written():
    """Press Ctrl-C, once, as soon as a file is there: `with interrupt_when_written(file): ...`."""

    @contextlib.contextmanager
    def pressed(file):
        def stop():
            while not file.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=stop)
        thread.start()
        yield
        thread.join()

    return pressed


@pytest.fixture(scope="session")
def fitted(tmp_path_factory):
    """A folder with a table, and a model of two of its three columns, in an order of their own."""
    from commands import TINY, table

    from roughflow.cli import main

    folder = tmp_path_factory.mktemp("fitted")
    table(folder / "data.csv", rows=200, columns=("a", "b", "c"))
    (folder / "new").mkdir()
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
    from roughflow.cli import main

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
