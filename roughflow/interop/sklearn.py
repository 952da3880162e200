"""A stochastic flow as a scikit-learn density estimator."""

import jax
import numpy as np
from sklearn.base import BaseEstimator, DensityMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

import roughflow as rf


class StochasticFlowDensity(DensityMixin, BaseEstimator):
    """The density of a table's rows, as that of a neural SDE fitted to them by `rf.fit_density`.

    It numbers among scikit-learn's density estimators, beside `GaussianMixture` and `KernelDensity`: it goes
    into a `Pipeline` and is tuned by `GridSearchCV`. Rows are standardised by `fit`, so no scaler is
    needed before it. A constant column, or one that the others determine, has no density and is refused.

    With noise, a log density is a Monte Carlo estimate: the values of `score_samples` are the same in every
    call with the same rows, and differ within their error when rows are reordered or left out. The error
    itself comes from `model_.estimate`. Numbers have JAX's precision, single unless
    `jax.config.update("jax_enable_x64", True)` asks for double.

    **Parameters:**

    - `noise`: size of the noise in units of the standardised data; 0 for a continuous normalizing flow,
      whose density is exact; "best" to choose it by the validation rows.
    - `family`: "gaussian", "marginals" or "flow"; None for the best by cross-validation where rows are few,
      and for a flow otherwise, or where `steps` is set.
    - `bounds`, `rounding`: of columns, by name or number: `{"share": (0, 1), "income": (0, None)}`, beyond
      which the density is zero, and `{"age": 1.0}`, how wide the steps of rounded values are; "auto" to find
      them.
    - `marginals`: whether columns are first mapped to nearly normal ones; None to let cross-validation say.
    - `smoothing`, `outliers`: the size of the noise on the rows in training, and the share of rows that are
      thrown far out; None to choose them by the size of the table.
    - `width`, `depth`: of the network; a width of None is chosen by the number of rows.
    - `steps`, `likelihood_steps`: of the two stages; None to choose them by the size of the table.
    - `batch_size`, `learning_rate`: of the regression.
    - `validation_fraction`: share of the rows to validate on; 0 for none.
    - `patience`: number of validation checks without improvement before a stage goes back to its best model
      and ends; None to take all steps.
    - `score_paths`: paths per row in `score_samples`, at most; None for the default of `model_.estimate`.
    - `random_state`: an int, a `numpy.random.RandomState`, or None.
    - `verbose`: show a progress bar.

    **After `fit`:** `model_`, an `rf.tables.Standardised` that `rf.save` can write; `family_`; `history_`, an
    `rf.train.History`; `n_features_in_`; and `feature_names_in_`, if the table had names.

    ```python
    from sklearn.datasets import load_iris
    from roughflow.interop.sklearn import StochasticFlowDensity

    X = load_iris(as_frame=True).data
    density = StochasticFlowDensity(width=8, depth=1, steps=20, likelihood_steps=2, random_state=0).fit(X)
    density.score_samples(X).shape  # (150,)
    density.sample(5).shape  # (5, 4)
    ```
    """

    def __init__(
        self,
        noise=0.0,
        bounds=None,
        rounding=None,
        marginals=None,
        smoothing=None,
        outliers=None,
        width=None,
        depth=3,
        steps=None,
        likelihood_steps=None,
        batch_size=512,
        learning_rate=2e-3,
        validation_fraction=0.1,
        patience=5,
        score_paths=64,
        random_state=None,
        verbose=False,
        family=None,
    ):
        self.noise = noise
        self.family = family
        self.bounds = bounds
        self.rounding = rounding
        self.marginals = marginals
        self.smoothing = smoothing
        self.outliers = outliers
        self.width = width
        self.depth = depth
        self.steps = steps
        self.likelihood_steps = likelihood_steps
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.score_paths = score_paths
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X, y=None):
        """Fit to the rows of X; y is ignored. Ctrl-C keeps what was reached in `model_`, then interrupts."""
        del y
        X = np.asarray(validate_data(self, X, dtype=np.float64, ensure_min_samples=2))
        seed = _seed(self.random_state)
        fitted = rf.fit_density(
            X,
            key=jax.random.key(seed),
            noise=self.noise,
            family=self.family,
            bounds=self.bounds,
            rounding=self.rounding,
            marginals=self.marginals,
            smoothing=self.smoothing,
            outliers=self.outliers,
            width=self.width,
            depth=self.depth,
            columns=[str(name) for name in getattr(self, "feature_names_in_", ())],
            validation=self.validation_fraction,
            patience=self.patience,
            steps=self.steps,
            likelihood_steps=self.likelihood_steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            progress=bool(self.verbose),
        )
        self.model_ = fitted.model
        self.family_ = fitted.family
        self.history_ = fitted.history
        # A plain number, for a key of JAX cannot be pickled.
        self._score_seed = seed
        if fitted.interrupted:
            # A search over many fits must end too, not go on to the next.
            raise KeyboardInterrupt
        return self

    def score_samples(self, X):
        """The log density of each row, in the units of the data: shape (n_samples,)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        limit = {} if self.score_paths is None else {"max_paths": self.score_paths}
        key = jax.random.fold_in(jax.random.key(self._score_seed), 1)
        return np.asarray(self.model_.estimate(X, key=key, **limit).log_prob, np.float64)

    def score(self, X, y=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """The mean log density of the rows, as `GaussianMixture` has it (`KernelDensity` has the sum), so
        that folds of different sizes compare; y is ignored."""
        del y
        return float(np.mean(self.score_samples(X)))

    def sample(self, n_samples=1, random_state=None):
        """Draw rows from the model: shape (n_samples, n_features).

        `random_state` replaces the estimator's own, which, if it is an int, gives the same rows each time.
        """
        check_is_fitted(self)
        if n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, got {n_samples}")
        key = jax.random.key(_seed(self.random_state if random_state is None else random_state))
        draws = self.model_.sample(key=jax.random.fold_in(key, 2), shape=(n_samples,))
        return np.asarray(draws, np.float64)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        # Random numbers belong to a row's place in X: with noise, a row's value moves within its Monte Carlo
        # error when the rows before it change. Without noise there is nothing random.
        tags.non_deterministic = self.noise != 0
        return tags


def _seed(random_state) -> int:
    return int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
