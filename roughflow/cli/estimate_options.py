"""The options of `roughflow estimate`. Nothing heavy is imported here, so that help is there at once."""

import argparse
from pathlib import Path

from . import values

MODELS = {
    "brownian": "dX = μ dt + σ dB",
    "gbm": "dX = μX dt + σX dB",
    "vasicek": "dX = κ(μ − X) dt + σ dB",
    "cir": "dX = κ(μ − X) dt + σ√X dB",
    "ckls": "dX = κ(μ − X) dt + σX^γ dB",
    "cev": "dX = μX dt + σX^γ dB",
    "jacobi": "dX = κ(μ − X) dt + σ√(X(1 − X)) dB",
    "double-well": "dX = (aX − bX³) dt + σ dB",
}
DESCRIPTION = (
    "Fit a named SDE to a series by maximum likelihood, and print its parameters with standard errors. "
    "Dates are counted in years; empty values make longer gaps. The models: "
    + ", ".join(f"{name} ({equation})" for name, equation in MODELS.items())
    + "."
)
EXAMPLE = "estimate rates.csv --time date --value rate --model cir --scale 0.01 --out figures"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data",
        type=Path,
        metavar="SERIES.csv",
        help="a .csv or .tsv file with a header, either with .gz too; - for CSV from standard input",
    )
    parser.add_argument(
        "--time", required=True, metavar="COLUMN", help="dates, such as 2024-01-31, or numbers; increasing"
    )
    parser.add_argument("--value", required=True, metavar="COLUMN", help="what was observed then")
    parser.add_argument(
        "--model",
        choices=MODELS,
        metavar="|".join(MODELS),
        help="the SDE; with --compare the best by AIC unless named",
    )
    parser.add_argument(
        "--compare", action="store_true", help="fit all models the series is possible under, and rank by AIC"
    )
    parser.add_argument(
        "--scale",
        type=values.positive,
        default=1.0,
        metavar="X",
        help="to multiply values by, 0.01 for percent",
    )
    parser.add_argument(
        "--measurement-noise",
        type=values.positive,
        metavar="X",
        help="values have normal errors; the standard deviation that its search starts from, once scaled",
    )
    parser.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="take exact transition densities where they are known; default: yes",
    )
    parser.add_argument(
        "--forecast",
        metavar="TIMES",
        help="print quantiles at these times, with commas between them: dates, or numbers counted from the "
        "last value, in years if the series has dates",
    )
    parser.add_argument(
        "--parameter-uncertainty",
        action="store_true",
        help="forecasts include the errors of the estimates",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write figures, estimate.png, and estimate.json there; forecast.csv with --forecast",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
