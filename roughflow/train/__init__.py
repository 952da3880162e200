"""Stage 7, training: objectives, one fitting loop, checkpoints."""

from .._devices import check_backend as check_backend
from ._checkpoint import History as History, progress_bar as progress_bar, steps_of as steps_of
from ._data import (
    LEAVE_ONE_OUT as LEAVE_ONE_OUT,
    Links as Links,
    check_share as check_share,
    folds as folds,
    grid_step as grid_step,
    hold_out as hold_out,
    identified as identified,
    mean_and_error as mean_and_error,
    rng_of as rng_of,
    row_codes as row_codes,
)
from ._fit import (
    Fitted as Fitted,
    RunOptions as RunOptions,
    TrainingOptions as TrainingOptions,
    fit as fit,
)
from ._flows import (
    best_noise as best_noise,
    neural_flow as neural_flow,
    velocity_flow as velocity_flow,
    with_noise as with_noise,
)
from ._interpolant import Interpolant as Interpolant
from ._maximum_likelihood import MaximumLikelihood as MaximumLikelihood
from ._objective import (
    AbstractObjective as AbstractObjective,
    AbstractStatefulObjective as AbstractStatefulObjective,
)
from ._reverse_kl import (
    EvidenceBound as EvidenceBound,
    ReverseKL as ReverseKL,
    evidence_bound as evidence_bound,
)
