"""Stage 8, density estimation for tabular data: `fit_density` and the model that it returns."""

from ._anomaly import KernelDensity as KernelDensity
from ._columns import Encoding as Encoding, Relations as Relations, WithRelations as WithRelations
from ._fit_density import fit_density as fit_density
from ._fitted_density import FittedDensity as FittedDensity, Score as Score
from ._large_tables import (
    ParquetTable as ParquetTable,
    check_parquet_columns as check_parquet_columns,
    estimate_chunks as estimate_chunks,
    parquet_blocks as parquet_blocks,
    parquet_file as parquet_file,
    parquet_rows as parquet_rows,
)
from ._marginals import Marginals as Marginals
from ._mixture import (
    Conditional as Conditional,
    MixedDensity as MixedDensity,
    MixtureComponents as MixtureComponents,
)
from ._regression import Prediction as Prediction, Regression as Regression, fit_regression as fit_regression
from ._stages import (
    LIKELIHOOD_ROWS as LIKELIHOOD_ROWS,
    FlowOptions as FlowOptions,
    second_file as second_file,
)
from ._standardised import (
    Standardised as Standardised,
    standardisation as standardisation,
    stationary_sde as stationary_sde,
)
