"""The paper's theorem on coupled paths: densities and gradients converge as the path is resolved."""

import importlib.util
from pathlib import Path

import pytest

SIZES = (4, 64)

# The slopes that must be met by the largest error over time and by the error at the end time, and the
# errors of log p that may remain. Uniformly in time the rate is n^(-1/2) for both noises; at the end
# time it is 1/n or better for commutative noise.
BOUNDS = {
    "commutative noise": {"sup over t": (-0.3, 0.2), "at T": (-0.8, 0.02)},
    "non-commutative noise": {"sup over t": (-0.3, 0.3), "at T": (-0.4, 0.06)},
}


@pytest.fixture(scope="module")
def example():
    source = Path(__file__).parents[1] / "examples" / "convergence.py"
    spec = importlib.util.spec_from_file_location("convergence", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_density_and_gradient_converge(example):
    """Both noises in one test: they share what is compiled."""
    for noise, twist in example.NOISES.items():
        found = example.errors(twist, SIZES, num_paths=40, resolution=256)
        assert list(found) == ["Karhunen-Loève", "piecewise linear"]
        for driver, (value, gradient) in found.items():
            for what, errors in (("log p", value), ("gradient", gradient)):
                for when, error in example.medians(errors).items():
                    least_slope, largest_error = BOUNDS[noise][when]
                    message = f"{noise}, {driver}, {what}, {when}: {error}"
                    assert example.slope(SIZES, error) < least_slope, message
                    assert what == "gradient" or error[-1] < largest_error, message
