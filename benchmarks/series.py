"""Time series: `python -m benchmarks.series [--part accuracy fits coverage levels speed]`, in float64.

- accuracy: transition log-densities of SDEs with known transitions, computed without this knowledge, compared
  with the methods of Euler, Milstein, local linearisation and Pedersen.
- speed: the likelihood and scores of 5,000 transitions, and a complete fit.
- coverage: how often 95 % intervals cover the truth in 200 simulated series; finished fits are stored in the
  temporary directory.
- levels: intervals, forecast bands and residual tests of 200 simulated series of each of six processes.
- fits: two components with correlated noise, Heston's model, a series with half of its values deleted, and a
  series with measurement errors.

The last lines of each part state the requirements and whether they are met.
"""

import argparse

import jax

from benchmarks.series_accuracy import SPANS, accuracy
from benchmarks.series_coverage import coverage
from benchmarks.series_fits import fits
from benchmarks.series_levels import levels
from benchmarks.series_speed import speed

PARTS = ("accuracy", "speed", "fits", "coverage", "levels")


def main() -> None:
    options = parse_arguments()
    jax.config.update("jax_enable_x64", True)
    parts = {
        "accuracy": lambda: accuracy(options.dt),
        "speed": speed,
        "fits": fits,
        "coverage": lambda: coverage(options.series, options.fresh),
        "levels": lambda: levels(options.series, options.fresh),
    }
    for name in PARTS:
        if name in (options.part or PARTS):
            print(f"{name}\n", flush=True)
            for line in parts[name]():
                print(line, flush=True)
            print()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS)
    parser.add_argument("--dt", nargs="+", choices=list(SPANS), help="of accuracy")
    parser.add_argument("--series", type=int, default=200, help="number of series for coverage and levels")
    parser.add_argument("--fresh", action="store_true", help="repeat stored fits")
    return parser.parse_args()


if __name__ == "__main__":
    main()
