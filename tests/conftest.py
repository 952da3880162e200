"""Tests run in float64 with implicit rank promotion an error; float32 is asked for where it is meant."""

import os

# Most of a run is compiling small programs that run once; examples in subprocesses inherit this.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key():
    return jax.random.key(20)
