"""The parser: commands, options and their types. This module imports nothing heavy, so that --help is
fast."""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import roughflow as rf

from .startup import Refused


def _number(kind: Callable, accept: Callable[[float], bool], description: str) -> Callable[[str], float]:
    def read(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and accept(value)):
            raise argparse.ArgumentTypeError(f"expected {description}, got {text!r}")
        return value

    return read


as_count = _number(int, lambda n: n >= 1, "a whole number of at least 1")
# JAX accepts only 32-bit seeds unless 64-bit precision is enabled.
as_seed = _number(int, lambda n: 0 <= n < 2**31, f"a whole number from 0 to {2**31 - 1}")
as_whole_number = _number(int, lambda n: n >= 0, "a whole number of at least 0")
as_positive = _number(float, lambda v: v > 0, "a number above 0")
as_not_negative = _number(float, lambda v: v >= 0, "a number of at least 0")
as_share = _number(float, lambda v: 0 <= v < 1, "a fraction of at least 0 and below 1")


def as_noise(text: str) -> float | str:
    return text if text == "best" else _size(text)


_size = _number(float, lambda v: v >= 0, "best, or a number of at least 0")


def _by_column(text: str, value: Callable[[str], Any], example: str) -> dict[str, Any]:
    """Parse values by column name, as in A=VALUE,B=VALUE."""
    parts = [part.rpartition("=") for part in text.split(",")]
    names = [name.strip() for name, _, _ in parts]
    try:
        if not all(names) or len(set(names)) < len(names):
            raise ValueError
        return {name: value(part) for name, (_, _, part) in zip(names, parts, strict=True)}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected different columns with values, as in {example}, got {text!r}"
        ) from None


def as_bounds(text: str) -> dict[str, tuple[float | None, float | None]]:
    def limits(part: str) -> tuple[float | None, float | None]:
        low, colon, high = part.partition(":")
        if not colon or not (low + high).strip():
            raise ValueError
        limits = tuple(float(limit) if limit.strip() else None for limit in (low, high))
        if limits[0] is not None and limits[1] is not None and not limits[0] < limits[1]:
            problem = "are reversed" if limits[0] > limits[1] else "are empty"
            raise argparse.ArgumentTypeError(f"the bounds {part} {problem}, got {text!r}")
        return limits  # pyright: ignore

    return _by_column(text, limits, "share=0:1,income=0:")


def as_rounding(text: str) -> dict[str, float] | str:
    return text if text == "auto" else _by_column(text, float, "age=1,height=0.5")


def as_types(text: str) -> dict[str, str]:
    return _by_column(text, str, "age=integer,smoker=category")


def as_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"expected different names separated by commas, got {text!r}")
    return names


def as_start(text: str) -> dict[str, float]:
    try:
        pairs = [part.rsplit("=", 1) for part in text.split(",")]
        return {name.strip(): float(number) for name, number in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected NAME=NUMBER separated by commas, got {text!r}") from None


def as_process(text: str) -> tuple[str, int, int]:
    """Parse the address of the first process, the index of this process, and the number of processes."""
    try:
        address, which, count = text.split(",")
        if ":" not in address or not 0 <= int(which) < int(count):
            raise ValueError
        return address, int(which), int(count)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT,I,N with I below N, got {text!r}") from None


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
SYSTEMS = {  # SDEs of several components, some of which may be hidden
    "heston": "price dS = μS dt + √V S dB₁, variance dV = κ(θ − V) dt + σ√V dB₂",
    "stochastic-volatility": "price dS = μS dt + exp(H/2) S dB₁, log-variance dH = κ(θ − H) dt + σ dB₂",
    "lotka-volterra": "prey dX = X(α − βY) dt + σ₁X dB₁, predators dY = Y(δX − γ) dt + σ₂Y dB₂",
    "fitzhugh-nagumo": "potential dX = (X − X³ − Y + s)/ε dt + σ₁dB₁, recovery dY = (γX − Y + β) dt + σ₂dB₂",
    "sir": "susceptible dS = −F, infectious dI = F − R, with infections F and recoveries R",
    "compartments": "dX = (A X + B u) dt + σ dB with inputs u",
}
ESTIMATE_DESCRIPTION = (
    "Fit a named SDE to a series by maximum likelihood, and print its parameters with standard errors. "
    "Dates are converted to years, and empty cells are missing values. The models are "
    + ", ".join(f"{name} ({equation})" for name, equation in {**MODELS, **SYSTEMS}.items())
    + "."
)
ESTIMATE_EXAMPLE = "estimate rates.csv --time date --value rate --model cir --scale 0.01 --out figures"


def _series_options(parser: argparse.ArgumentParser) -> None:
    """Add options for the series and for its model."""
    parser.add_argument(
        "data",
        type=Path,
        metavar="SERIES.csv",
        help="a .csv or .tsv file with a header (also with .gz); - for CSV from standard input",
    )
    parser.add_argument(
        "--time", required=True, metavar="COLUMN", help="increasing dates, such as 2024-01-31, or numbers"
    )
    parser.add_argument(
        "--value",
        required=True,
        type=as_names,
        metavar="COLUMN,…",
        help="columns of observed values, one for each observed component of the model",
    )
    parser.add_argument(
        "--model",
        choices=[*MODELS, *SYSTEMS],
        metavar="|".join([*MODELS, *SYSTEMS]),
        help="the SDE; default with --compare: the best one by AIC",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="fit all one-component models whose state space contains the observed values, and rank them by "
        "AIC",
    )
    parser.add_argument(
        "--scale",
        type=as_positive,
        default=1.0,
        metavar="X",
        help="factor that multiplies the values, such as 0.01 for percent; default: 1",
    )
    parser.add_argument(
        "--measurement-noise",
        type=as_positive,
        metavar="X",
        help="fit the standard deviation of normal measurement errors too; X is its starting value, after "
        "scaling",
    )


def _hidden_options(parser: argparse.ArgumentParser) -> None:
    """Add options for hidden components, counts, inputs and parameters."""
    parser.add_argument(
        "--hidden",
        type=as_names,
        default=[],
        metavar="NAME,…",
        help="components of the model that are not observed, such as variance for heston",
    )
    parser.add_argument(
        "--observe",
        choices=["poisson", "negative-binomial"],
        help="treat the values as counts whose mean is the state, or its exponential if the state may be "
        "negative",
    )
    parser.add_argument(
        "--inputs",
        type=Path,
        metavar="FILE",
        help="table of inputs for compartments: the column of --time and one column per input, which is "
        "constant from one time to the next",
    )
    parser.add_argument(
        "--start",
        type=as_start,
        default={},
        metavar="NAME=X,…",
        help="starting values of parameters; default: from the moments of the series",
    )
    parser.add_argument(
        "--initial",
        type=lambda text: text if text == "stationary" else as_start(text),
        metavar="stationary|NAME=X,…",
        help="initial values of the components that are not observed exactly, or their stationary "
        "distribution; default: a flat prior",
    )
    parser.add_argument(
        "--fix", type=as_names, default=[], metavar="NAME,…", help="parameters that keep their starting value"
    )


def _estimate_options(parser: argparse.ArgumentParser) -> None:
    _series_options(parser)
    _hidden_options(parser)
    parser.add_argument(
        "--exact",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="use exact transition densities where they are known; default: yes",
    )
    parser.add_argument(
        "--forecast",
        metavar="TIMES",
        help="print quantiles at these times, separated by commas: dates, or numbers counted from the "
        "last time of the series, in years if the series has dates",
    )
    parser.add_argument(
        "--parameter-uncertainty",
        action="store_true",
        help="include the errors of the estimates in forecasts",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder for estimate.png, estimate.json and, with --forecast, forecast.csv",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results as JSON")


TOUR = """\
roughflow computes densities of stochastic differential equations. From the command line you can fit
a density to the rows of a table, evaluate log-densities of other rows, and draw new rows.

commands:
  demo        fit a banana-shaped density in about a minute, and plot it
                roughflow demo --out figures
  fit         fit a density to the rows of a table (.csv with a header, .tsv, .npy, .parquet)
                roughflow fit flowers.csv --columns length,width --out flowers.rf
  score       compute the log-density of each row of a table, with its error
                roughflow score flowers.rf more.csv --out scores.csv
  sample      draw new rows
                roughflow sample flowers.rf -n 1000 --out new.csv
  impute      fill the missing cells of a table, with a model fitted with --family mixture
                roughflow impute patients.rf patients.csv --out complete.csv
  tune        tune an MCMC sampler for your own density, and draw samples
                roughflow tune model:log_density --dimension 2 --out draws.csv
  estimate    fit a named SDE to a time series, with standard errors
                roughflow estimate rates.csv --time date --value rate --model cir
  reproduce   reproduce the figures of Hodgkinson et al. (2020), and print their metrics
                roughflow reproduce fig1 --out figures
"""
TABLES = (
    "a .csv or .tsv file with a header (also with .gz), or .npy or .parquet; - for CSV from standard input"
)
EPILOG = "`roughflow COMMAND --help` lists the options of a command. `rf.load` reads a model in Python."


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command and its options. --help and --version print, and raise `SystemExit`."""
    parser = _Parser(
        prog="roughflow",
        usage="roughflow COMMAND ...",
        description=TOUR,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"roughflow {rf.__version__}")
    # The description already lists the commands.
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", help=argparse.SUPPRESS, prog="roughflow"
    )
    for add in (_demo, _fit, _score, _sample, _impute, _tune, _estimate, _reproduce):
        add(commands)
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.error(
            "missing command: choose from demo, fit, score, sample, impute, tune, estimate or reproduce"
        )
    arguments.argv = list(argv)
    return arguments


class _Parser(argparse.ArgumentParser):
    """A parser whose errors have one line, where argparse would print several."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message} (see {self.prog} --help)")


def _command(commands, name: str, description: str, example: str) -> argparse.ArgumentParser:
    # No abbreviations, because they may become ambiguous when an option is added.
    return commands.add_parser(
        name, description=description, epilog=f"example: roughflow {example}", allow_abbrev=False
    )


def _demo(commands) -> None:
    parser = _command(commands, "demo", "Fit a banana-shaped density and plot it.", "demo --out figures")
    parser.add_argument(
        "--out", type=Path, default=Path("figures"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--steps", type=as_count, metavar="N", help="training steps; default: 2000")
    _seed(parser)
    _quiet(parser)


def _fit(commands) -> None:
    parser = _command(
        commands,
        "fit",
        "Fit a density to the rows of a table: by regression first, then by maximum likelihood. Until the "
        "model is written, the state of the fit is saved in MODEL.rf.checkpoint. If you stop the fit with "
        "Ctrl-C, --resume continues it, and the result is the same.",
        "fit flowers.csv --columns length,width --out flowers.rf",
    )
    parser.add_argument("data", type=Path, metavar="DATA", help=TABLES)
    parser.add_argument("--out", type=Path, required=True, metavar="MODEL.rf", help="file for the model")
    parser.add_argument("--columns", type=as_names, metavar="A,B,C", help="columns to use; default: all")
    parser.add_argument("--report", type=Path, metavar="REPORT.html", help="also write an HTML report")
    parser.add_argument(
        "--given",
        type=as_names,
        metavar="A,B,C",
        help="columns to condition on",
    )
    parser.add_argument(
        "--groups",
        metavar="A",
        help="column of group numbers, which is not modelled: rows of one group are never split between "
        "training and validation",
    )
    _fit_model(parser)
    _fit_training(parser)
    _devices(parser)
    parser.add_argument(
        "--join",
        nargs="?",
        const="",
        type=as_process,
        metavar="HOST:PORT,I,N",
        help="make this process one of several that fit together and are started with the same options: "
        "process I of N, the first one at HOST:PORT; under Slurm or Open MPI, --join without a value",
    )
    _seed(parser)
    _resume(parser, "MODEL.rf")
    _quiet(parser)


def _fit_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--family",
        choices=("gaussian", "marginals", "flow", "mixture"),
        help="gaussian, marginals (a Gaussian of transformed columns), flow or mixture (also for text, "
        "integers and missing cells); default: the best by cross-validation if there are fewer than 500 "
        "rows, otherwise a flow unless a Gaussian is better; with --steps or --seconds, a flow",
    )
    parser.add_argument(
        "--types",
        type=as_types,
        metavar="A=TYPE,...",
        help="types of columns for --family mixture: continuous, integer, category or zero-inflated; "
        "default: detected",
    )
    parser.add_argument(
        "--noise",
        type=as_noise,
        default=0.0,
        metavar="N",
        help="size of the noise in units of the standardised rows, or 'best' to choose the size with the "
        "highest likelihood on the validation rows; default: 0",
    )
    parser.add_argument(
        "--bounds",
        type=as_bounds,
        metavar="A=LOW:HIGH,...",
        help="bounds of columns, as in share=0:1,income=0: (the density is zero outside)",
    )
    parser.add_argument(
        "--rounding",
        type=as_rounding,
        metavar="A=N,...|auto",
        help="widths of the rounding of columns, as in age=1,height=0.5, or 'auto' to detect them",
    )
    parser.add_argument(
        "--marginals",
        action=argparse.BooleanOptionalAction,
        help="whether to transform columns to nearly normal ones first; default: chosen by cross-validation",
    )


def _fit_training(parser: argparse.ArgumentParser) -> None:
    add = lambda option, kind, default, text: parser.add_argument(
        option, type=kind, default=default, metavar="N", help=f"{text}; default: %(default)s"
    )
    number = lambda option, kind, text: parser.add_argument(option, type=kind, metavar="N", help=text)
    number(
        "--smoothing", as_not_negative, "noise added to the training rows; default: 0.3 for few rows, else 0"
    )
    number(
        "--outliers",
        as_share,
        "fraction of training rows with large noise; default: 0.02 for four or more columns, else 0",
    )
    number("--steps", as_count, "steps of the regression stage; default: 20000, fewer for few rows")
    number(
        "--likelihood-steps",
        as_whole_number,
        "steps of the likelihood stage; default: up to 100, depending on the table",
    )
    number(
        "--seconds",
        as_positive,
        "time budget after compilation, in seconds, instead of a number of steps",
    )
    number(
        "--width",
        as_count,
        "width of the network; default: 128, or 256 from 20,000 rows on, or 512 for a million cells or more",
    )
    number("--depth", as_count, "depth of the network; default: 3, or 4 for a million cells or more")
    add("--batch-size", as_count, 512, "number of rows in each step of the regression")
    add("--learning-rate", as_positive, 2e-3, "learning rate of the regression")
    add("--validation", as_share, 0.1, "fraction of the rows to use for validation, 0 for none")
    add(
        "--patience",
        as_whole_number,
        5,
        "number of validation checks without improvement before a stage ends, 0 for no early stopping",
    )


def _impute(commands) -> None:
    parser = _command(
        commands,
        "impute",
        "Draw the missing cells of each row given its other cells, with a model fitted with --family "
        "mixture.",
        "impute patients.rf patients.csv --out complete.csv",
    )
    parser.add_argument("model", type=Path, metavar="MODEL.rf")
    parser.add_argument("data", type=Path, metavar="DATA", help=TABLES)
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: - (CSV to standard output)")
    parser.add_argument(
        "-n",
        dest="count",
        type=as_count,
        default=1,
        metavar="N",
        help="number of completed copies of the table, one after the other; default: %(default)s",
    )
    _seed(parser)
    _force(parser)


def _score(commands) -> None:
    parser = _command(
        commands,
        "score",
        "Write the log-density of each row, its total error, and its effective number of paths, as CSV. "
        "Columns are matched by name, or by position in an .npy file.",
        "score flowers.rf more.csv --tolerance 0.01 --out scores.csv",
    )
    parser.add_argument("model", type=Path, metavar="MODEL.rf")
    parser.add_argument("data", type=Path, metavar="DATA", help=TABLES)
    parser.add_argument("--out", type=Path, metavar="SCORES.csv", help="default: - (standard output)")
    parser.add_argument(
        "--tolerance", type=as_positive, metavar="E", help="add paths until every total error is below E"
    )
    parser.add_argument("--paths", type=as_count, metavar="N", help="maximum number of paths per row")
    _devices(parser)
    _seed(parser)
    _resume(parser, "SCORES.csv")
    _quiet(parser)


def _sample(commands) -> None:
    parser = _command(
        commands, "sample", "Draw rows from a model.", "sample flowers.rf -n 1000 --out new.csv"
    )
    parser.add_argument("model", type=Path, metavar="MODEL.rf")
    parser.add_argument(
        "-n", dest="count", type=as_count, default=1000, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="output file, .csv, .tsv, .csv.gz or .npy; default: - (CSV to standard output)",
    )
    _seed(parser)
    _force(parser)


def _tune(commands) -> None:
    parser = _command(
        commands,
        "tune",
        "Tune a sampler for a density, then draw from it. MODULE:FUNCTION names a Python function, in the "
        "current folder or an installed package, that takes z of shape (d,) and returns log p(z) up to a "
        "constant. The state of the run is saved in DRAWS.checkpoint. If you stop the run with Ctrl-C, "
        "--resume continues it.",
        "tune model:log_density --dimension 2 --out draws.csv",
    )
    parser.add_argument("target", metavar="MODULE:FUNCTION")
    parser.add_argument(
        "--dimension",
        type=as_count,
        metavar="D",
        help="dimension of z; default: the function's attribute `dimension`",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DRAWS",
        help="file for the draws, .csv, .tsv, .csv.gz or .npy",
    )
    parser.add_argument("--noise-out", type=Path, metavar="NOISE.rf", help="file for the learned noise")
    add = lambda option, default, text: parser.add_argument(
        option, type=as_count, default=default, metavar="N", help=f"{text}; default: %(default)s"
    )
    add("--chains", 64, "number of parallel chains")
    add("--gradients", 500_000, "total number of gradients of log p for tuning")
    add("--draws", 1000, "number of draws per chain")
    parser.add_argument(
        "--thin", type=as_count, default=1, metavar="N", help="number of steps per draw; default: 1"
    )
    _seed(parser)
    _resume(parser, "DRAWS")
    _quiet(parser)


def _estimate(commands) -> None:
    parser = _command(commands, "estimate", ESTIMATE_DESCRIPTION, ESTIMATE_EXAMPLE)
    _estimate_options(parser)
    _seed(parser)
    _force(parser)
    _quiet(parser)


def _reproduce(commands) -> None:
    parser = _command(
        commands,
        "reproduce",
        "Reproduce figures 1 to 4 of Hodgkinson et al. (2020) as PNG and JSON files.",
        "reproduce fig1 --out figures",
    )
    parser.add_argument(
        "name",
        choices=["fig1", "fig2", "fig3", "fig4", "all"],
        metavar="fig1|fig2|fig3|fig4|all",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("figures"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument(
        "--steps",
        type=as_count,
        metavar="N",
        help="training steps of each fit by maximum likelihood; the steps of regressions scale with them",
    )
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    _seed(parser)
    _quiet(parser)


def _devices(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices",
        type=as_count,
        metavar="N",
        help="number of devices to use: GPUs, or CPU cores if there is no GPU; default: one",
    )


def _seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=as_seed, default=0, metavar="N", help="random seed; default: 0")


def _resume(parser: argparse.ArgumentParser, out: str) -> None:
    parser.add_argument("--resume", action="store_true", help="continue an interrupted run")
    parser.add_argument("--force", action="store_true", help=f"overwrite {out} and an existing checkpoint")


def _force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="overwrite the output if it exists")


def _quiet(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="show no progress")
