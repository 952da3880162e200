"""Is volatility rough? Fractional Ornstein–Uhlenbeck processes fitted to two daily series of US shares.

The first series is the volatility index VIX, 2014 to 2018, which is implied by option prices. The second is
the logarithm of the daily range of the S&P 500, from low to high. It measures volatility with a large error,
and such errors alone make a series look rough. Both are included in the package arch; run `pip install arch`
first. Time is counted in trading days, because a process with memory requires equally spaced times.
"""

import sys

import jax
import numpy as np

import roughflow as rf


def series():
    """Return the logarithm of volatility for each series, by name."""
    try:
        from arch.data import sp500, vix  # pyright: ignore[reportMissingImports]
    except ImportError:
        sys.exit("this example needs arch: pip install arch")
    index, prices = vix.load()["vix"].dropna(), sp500.load().loc["2014":]
    spread = np.log(prices["High"] / prices["Low"])
    return {
        "VIX": np.log(np.asarray(index, float)),
        "range of the S&P 500": np.log(np.asarray(spread, float)),
    }


def main():
    jax.config.update("jax_enable_x64", True)
    key = jax.random.key(0)
    for name, values in series().items():
        days, mean, step = np.arange(len(values), dtype=float), values.mean(), np.diff(values).std()
        rough = rf.fit_sde(rf.FractionalOrnsteinUhlenbeck(0.1, mean, step, 0.4), days, values, key=key)
        markov = rf.OrnsteinUhlenbeck(0.1, mean, step)  # pyright: ignore[reportCallIssue]
        plain = rf.fit_sde(markov, days, values, key=key)
        print(f"{name}\n{rough.summary()}")
        low, high = rough.confint()["hurst"]
        statistic, p_value = rough.likelihood_ratio(plain)
        print(f"Hurst exponent {rough.params['hurst']:.3f}, 95 % interval {low:.3f} to {high:.3f}")
        print(f"against H = 1/2: twice the log-likelihood ratio {statistic:.2f}, p-value {p_value:.2g}")
        for model, result in (("rough", rough), ("plain", plain)):
            print(f"residuals, {model}: Ljung-Box p-value {result.residuals(key=key).ljung_box:.2g}")
        print()


if __name__ == "__main__":
    main()
