"""The paper's theorem on coupled paths: densities and gradients converge as the path is resolved."""

import importlib.util
from pathlib import Path

import pytest

SIZES = (4, 16, 64)


@pytest.fixture(scope="module")
def example():
    source = Path(__file__).parents[1] / "examples" / "convergence.py"
    spec = importlib.util.spec_from_file_location("convergence", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# For each noise: the slope that must be met at the end time, and the errors of log p that may remain
# there and at the worst time. Uniformly in time the rate is n^(-1/2) for both.
@pytest.mark.parametrize(
    ("noise", "end_slope", "end_error", "worst_error"),
    [("commutative noise", -0.8, 0.01, 0.1), ("non-commutative noise", -0.4, 0.05, 0.2)],
)
def test_density_and_gradient_converge(example, noise, end_slope, end_error, worst_error):
    found = example.errors(example.NOISES[noise], SIZES, num_paths=16, resolution=512)
    assert len(found) == 2
    for driver, pair in found.items():
        for what, error in zip(("log p", "gradient"), pair, strict=True):
            worst, end = example.medians(error).values()
            message = f"{driver}, {what}: worst {worst}, at the end {end}"
            assert example.slope(SIZES, worst) < -0.3, message
            assert example.slope(SIZES, end) < end_slope, message
            if what == "log p":
                assert worst[-1] < worst_error, message
                assert end[-1] < end_error, message
