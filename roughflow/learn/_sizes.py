"""Defaults of `fit_density` that depend on the size of a table; `benchmarks.tables` compares them."""

from dataclasses import dataclass

WAVES = 2000  # rows from which fine waves of the state help in the plane; in more dimensions they mislead
WIDE = 20_000  # rows from which a wider network pays
SPARSE = 30  # rows per column below which a network learns them by heart, unless it is kept from that
SMALL = 500  # sets of rows below which densities are compared by cross-validation, not on validation rows
TINY, TINY_PER_COLUMN = 64, 10  # rows, and rows per column, below which no flow is trained


@dataclass(frozen=True)
class Sizes:
    """Of a table with so many distinct `rows` in so many `sets` that stay together, `columns` to model and
    others that are given."""

    rows: int
    columns: int
    context: int
    sets: int

    @property
    def tiny(self) -> bool:
        return self.rows < max(TINY, TINY_PER_COLUMN * (self.columns + self.context))

    @property
    def small(self) -> bool:
        return self.sets < SMALL

    @property
    def sparse(self) -> bool:
        return self.rows < SPARSE * self.columns

    @property
    def plane(self) -> bool:
        return self.columns + self.context <= 2

    @property
    def wide(self) -> bool:
        return self.rows >= WIDE and not self.plane

    @property
    def width(self) -> int:
        return 256 if self.wide else 128

    @property
    def num_features(self) -> int:
        return 64 if self.plane and self.rows >= WAVES else 0

    @property
    def worth(self) -> float:
        """Nats per column that maps of the columns must gain: given rows enough, a flow learns such things by
        itself, and maps bend what lies on a line or a plane."""
        return 0.05 if self.sparse else 0.5

    @property
    def smoothing(self) -> float:
        return 0.3 if self.sparse else 0.0

    @property
    def outliers(self) -> float:
        """Rows of few columns leave no holes. Elsewhere a network may be sure of finding nothing in one, and
        lose 100 nats on the row that turns up there."""
        return 0.0 if self.columns + self.context <= 3 else 0.02

    def noise(self, smoothing: float | None, outliers: float | None) -> tuple[float, float]:
        """Both as told, or as the size of the table has it."""
        width = self.smoothing if smoothing is None else smoothing
        share = self.outliers if outliers is None else outliers
        if width < 0:
            raise ValueError(f"smoothing must not be negative, got {width}")
        if not 0 <= share < 1:
            raise ValueError(f"outliers must be a share of the rows between 0 and 1, got {share}")
        return float(width), float(share)

    @property
    def steps(self) -> int:
        return min(20_000, max(2000, 4 * self.rows))

    @property
    def likelihood_steps(self) -> int:
        """Each takes a backward solve with a tangent for each column. After a long regression of a wide
        network it gains next to nothing, and on few rows too: their first steps are already the best."""
        if self.sparse or self.small:
            return 0
        return 100 if self.columns <= 3 else 0 if self.wide else 60
