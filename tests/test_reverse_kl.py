"""Variational inference: the bound is the divergence where that is known."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import roughflow as rf


class Shifted(eqx.Module):
    """−½|z − m|², the normal distribution N(m, 1) without its constant."""

    mean: jax.Array

    def __call__(self, z):
        return -0.5 * jnp.sum((z - self.mean) ** 2)


def langevin(mean):
    """dZ = ½(m − Z) dt + dB from N(0, 1), driven by enough functions that the distribution is the SDE's."""
    sde = rf.targeted_sde(Shifted(mean), rf.ConstantDiffusion(jnp.eye(1)))
    return rf.StochasticFlow(sde, rf.Normal(jnp.zeros(1)), driver=rf.Legendre(4))


def divergence(mean, t1=1.0):
    """The distribution at T is N(m(1 − e^{−T/2}), 1), so KL = ½m² e^{−T}."""
    return 0.5 * mean**2 * np.exp(-t1)


@pytest.mark.parametrize("num_paths", [0, pytest.param(32, marks=pytest.mark.slow)])
def test_the_loss_bounds_the_divergence_and_nears_it(num_paths, key):
    """Given its path Z is N(M, a²), a = e^(−T/2), and N(m(1 − a), 1) by itself. So with paths of the prior

        K = 0: the loss exceeds the divergence by I(Z; path) = −log a = ½T;
        K > 0: by E log(1 + (r − 1)/(K + 1)) at the most, r = p(Z | path)/p(Z), and that by Jensen is below
               log(1 + χ²/(K + 1)), χ² = E r − 1 = 1/a² − 1.

    For K = 0 a sample's term is ½(Z − m)² − ½ε² but for a constant, ε its start: of the variance
    1 + m²a² − a². More paths make it smaller.
    """
    mean, evidence, a, size = 1.5, 0.5 * np.log(2 * np.pi), np.exp(-0.5), 8000
    objective = rf.ReverseKL(Shifted(jnp.array([mean])), num_paths, batch_size=size)
    loss, metrics = objective(langevin(jnp.array([mean])), None, key=key)
    excess = float(loss) - (divergence(mean) - evidence)
    error = 4 * ((1 + (mean**2 - 1) * a**2) / size) ** 0.5
    least, most = (0.5, 0.5) if num_paths == 0 else (0, np.log1p((1 / a**2 - 1) / (num_paths + 1)))
    assert least - error < excess < most + error
    np.testing.assert_allclose(metrics["evidence_bound"], -loss)


@pytest.mark.parametrize("num_paths", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_target_is_not_trained_and_the_penalty_leaves_it_alone(num_paths, key):
    flow = langevin(jnp.array([1.5]))
    objective = rf.ReverseKL(Shifted(jnp.array([1.5])), num_paths, batch_size=16, l1=100.0)
    fitted = rf.fit(
        flow,
        key=key,
        objective=objective,
        steps=5,
        frozen=lambda f: f.base,
        progress=False,
        training=rf.train.TrainingOptions(learning_rate=0.1),
    )
    assert fitted.model.sde.log_density.mean == 1.5
    assert fitted.objective.log_density.mean == 1.5
    assert fitted.model.sde.diffusion.matrix < 1  # the penalty pulls at what can be learned


@pytest.mark.slow
def test_decay_of_weights_leaves_what_is_given_alone(key):
    """The target, in the flow and in the objective, and what a diffusion measures places by."""
    target = Shifted(jnp.array([1.5]))
    noise = rf.sde.LocalDiffusion(1, centre=jnp.array([0.5]), scale=2 * jnp.eye(1), width=3, key=key)
    flow = rf.StochasticFlow(rf.targeted_sde(target, noise), rf.Normal(jnp.ones(1)))
    decay = optax.adamw(0.1, weight_decay=0.5)
    fitted = rf.fit(
        flow,
        key=key,
        objective=rf.ReverseKL(target, 0, batch_size=8),
        steps=3,
        progress=False,
        training=rf.train.TrainingOptions(optimiser=decay),
    )
    sde = fitted.model.sde
    assert fitted.objective.log_density.mean == sde.log_density.mean == 1.5
    assert (sde.diffusion.centre, sde.diffusion.scale, sde.diffusion.inverse) == (0.5, 2, 0.5)
    assert fitted.model.base.loc != 1  # trained, and decayed
    assert not np.array_equal(sde.diffusion.network.weights[0], noise.network.weights[0])


def test_a_sample_that_escapes_is_no_gain(key):
    """dZ = Z³ dt: most samples leave for infinity, and each counts 1000 nats."""
    flow = rf.StochasticFlow(
        rf.ItoSDE(lambda t, z: z**3, rf.ConstantDiffusion(jnp.eye(1))), rf.Normal(jnp.zeros(1), 3.0)
    )
    loss, metrics = rf.ReverseKL(Shifted(jnp.zeros(1)), 0, batch_size=64)(flow, None, key=key)
    assert 0.3 < metrics["lost"] < 1
    assert loss > 990 * metrics["lost"]


def test_the_penalty_is_the_sum_of_absolute_values(key):
    flow, target = langevin(jnp.array([1.5])), Shifted(jnp.array([1.5]))
    losses = [rf.ReverseKL(target, 0, batch_size=16, l1=l1)(flow, None, key=key)[0] for l1 in (0.0, 0.25)]
    np.testing.assert_allclose(losses[1] - losses[0], 0.25)


class Cut(eqx.Module):
    """A bell around 0.2, and nothing where the first coordinate is below `lowest`."""

    lowest: float

    def __call__(self, z):
        return jnp.where(z[0] < self.lowest, -jnp.inf, -0.5 * jnp.sum((z - 0.2) ** 2))


@pytest.mark.parametrize("d", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_evidence_is_bounded_from_below_and_nearly_reached(d, key):
    """log ∫ exp = ½d log 2π for a bell whose constant is left out. The default proposal is exact on a linear
    SDE: what is missing is the divergence ½m²e^(−T) of each coordinate, of a term with twice that variance.
    """
    target = lambda z: -0.5 * jnp.sum((z - 0.2) ** 2)
    flow = rf.StochasticFlow(rf.overdamped_langevin(target, d), rf.Normal(jnp.zeros(d)), t1=2.0)
    bound = rf.train.evidence_bound(flow, Cut(-np.inf), key=key, num_samples=192, num_paths=256)
    gap, missing = 0.5 * d * np.log(2 * np.pi) - bound.value, d * divergence(0.2, t1=2.0)
    error = (2 * missing / 192) ** 0.5
    assert abs(gap - missing) < 4 * error
    np.testing.assert_allclose(bound.standard_error, error, rtol=0.3)
    with pytest.raises(rf.NonFiniteError, match=r"samples escaped or have no finite density: give the flow"):
        rf.train.evidence_bound(flow, Cut(0.0), key=key, num_samples=192, num_paths=256)
