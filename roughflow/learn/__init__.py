"""Stage 6, learning: objectives, one fitting loop, and files that keep what was learned."""

from .._devices import check_backend as check_backend
from ._bar import progress_bar as progress_bar
from ._evidence import EvidenceBound as EvidenceBound, evidence_bound as evidence_bound
from ._files import whole_file as whole_file
from ._fit import Fitted as Fitted, fit as fit
from ._fit_density import fit_density as fit_density
from ._fitted_density import FittedDensity as FittedDensity
from ._history import History as History
from ._in_chunks import estimate_chunks as estimate_chunks
from ._interpolant import Interpolant as Interpolant
from ._lock import held as held
from ._marginals import Marginals as Marginals
from ._maximum_likelihood import MaximumLikelihood as MaximumLikelihood
from ._neural import neural_flow as neural_flow, velocity_flow as velocity_flow
from ._objective import (
    AbstractObjective as AbstractObjective,
    AbstractStatefulObjective as AbstractStatefulObjective,
)
from ._parquet import (
    ParquetTable as ParquetTable,
    parquet_file as parquet_file,
    parquet_rows as parquet_rows,
)
from ._reverse_kl import ReverseKL as ReverseKL
from ._save import load as load, save as save
from ._score import Score as Score
from ._stages import LIKELIHOOD_ROWS as LIKELIHOOD_ROWS, second_file as second_file
from ._standardised import Standardised as Standardised, standardisation as standardisation
from ._stationarity import confinement as confinement, stationarity as stationarity
from ._staying import staying_sde as staying_sde
from ._with_noise import with_noise as with_noise
