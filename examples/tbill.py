"""The three-month US Treasury bill rate, 1959 to 2009: a comparison of SDEs, and a forecast.

The series is included in statsmodels; run `pip install statsmodels` first. It consists of the last value of
each quarter, in percent.
"""

import sys
from pathlib import Path

import jax
import numpy as np

import roughflow as rf
from roughflow import plots

FIGURE = Path(__file__).parents[1] / "figures" / "tbill.png"
MODELS = {  # class, initial parameters, and coordinates
    "Vasicek": (rf.OrnsteinUhlenbeck, (0.3, 0.05, 0.02), None),
    "Cox, Ingersoll and Ross": (rf.CoxIngersollRoss, (0.3, 0.05, 0.07), None),
    # The default coordinate of CKLS is the logarithm, in which rates of 0.1 % are outliers.
    "CKLS": (rf.CKLS, (0.3, 0.05, 0.3, 0.7), rf.transition.Root()),
}


def series():
    """Return the years and the rates."""
    try:
        from statsmodels.datasets import macrodata  # pyright: ignore[reportMissingImports]
    except ImportError:
        sys.exit("this example needs statsmodels: pip install statsmodels")
    data = macrodata.load_pandas().data
    return np.asarray(data["year"] + data["quarter"] / 4), np.asarray(data["tbilrate"]) / 100


def main():
    jax.config.update("jax_enable_x64", True)
    times, rates = series()
    key_fit, key_draw = jax.random.split(jax.random.key(0))
    fits = {
        name: rf.fit_sde(kind(*start), times, rates, key=key_fit, coordinates=coordinates)
        for name, (kind, start, coordinates) in MODELS.items()
    }
    for name, result in fits.items():
        print(f"{name}, AIC {result.aic:.2f}\n{result.summary()}\n")
    best = min(fits.values(), key=lambda result: result.aic)
    figure = plots.fitted_sde(best, key=key_draw, time_label="year", value_label="rate")
    plots.save(figure, FIGURE)
    print(f"wrote {FIGURE}")


if __name__ == "__main__":
    main()
