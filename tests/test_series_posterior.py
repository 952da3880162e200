"""The log-likelihood of a series as a function to sample from: its derivatives, and posteriors by it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import roughflow as rf
from roughflow.series._parameters import Domain
from roughflow.transition import forwards

POINT = jnp.array([1.5, 0.2, 0.4])


@pytest.fixture(scope="module")
def series():
    """Irregular times; values of Vasicek's model."""
    rng, x = np.random.default_rng(0), [0.1]
    steps = rng.uniform(0.05, 0.3, 40)
    for dt in steps:
        decay = np.exp(-2 * dt)
        x.append(0.1 + (x[-1] - 0.1) * decay + 0.25 * np.sqrt(1 - decay**2) * rng.normal())
    return np.concatenate([[0.0], np.cumsum(steps)]), np.array(x)


def normal(point, times, x):
    """The closed form for Vasicek's model."""
    kappa, mu, sigma = point
    decay = jnp.exp(-kappa * np.diff(times))
    spread = sigma * jnp.sqrt((1 - decay**2) / (2 * kappa))
    return jnp.sum(jax.scipy.stats.norm.logpdf(x[1:], mu + (x[:-1] - mu) * decay, spread))


def test_values_and_all_derivatives_are_those_of_the_closed_form(series, key):
    likelihood = rf.series_likelihood(rf.OrnsteinUhlenbeck(*POINT), *series, key=key)
    assert likelihood.effort is None
    found = lambda point: likelihood(rf.OrnsteinUhlenbeck(*point))
    known = lambda point: normal(point, *series)
    for transform in (jax.value_and_grad, lambda f: jax.jacrev(jax.grad(f))):
        ours, theirs = jax.jit(transform(found))(POINT), jax.jit(transform(known))(POINT)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8), ours, theirs)


def test_derivatives_go_forwards_in_what_is_differentiated_only():
    """Reverse mode is never asked of the function itself, nor a direction that nobody needs."""

    @jax.custom_jvp
    def square(x):
        return x**2

    @jax.custom_jvp
    def still(x):
        return x

    @square.defjvp
    def _(primals, tangents):
        (x,), (direction,) = primals, tangents
        return square(x), jnp.where(direction == 0, 0, 2 * x * direction)  # cannot be transposed

    @still.defjvp
    def _(primals, tangents):
        raise AssertionError("differentiated for nothing")

    function = lambda tree: jnp.sum(square(tree["a"])) * jnp.sum(still(tree["b"]))
    whole = lambda a: forwards({"a": a, "b": jnp.full(10, 0.1)}, function=function)
    np.testing.assert_allclose(jax.grad(whole)(jnp.arange(3.0)), [0, 2, 4])


def test_weighted_paths_have_the_same_derivatives_and_none_out_of_reach(series, key):
    """In a batch and compiled; −inf and zero where a transition is out of reach, as all are without noise."""
    start, effort = rf.OrnsteinUhlenbeck(*POINT), rf.transition.Effort(2, 2, 2)
    likelihood = rf.series_likelihood(start, *series, key=key, exact=False, effort=effort)
    points = jnp.stack([POINT, 1.1 * POINT, POINT.at[2].set(0.0)])
    total = lambda point: likelihood(rf.OrnsteinUhlenbeck(*point))
    value, slope = jax.jit(jax.vmap(jax.value_and_grad(total)))(points)
    known = [jax.value_and_grad(normal)(point, *series) for point in points[:2]]
    for i, (exact, exact_slope) in enumerate(known):
        np.testing.assert_allclose(value[i], exact, rtol=0, atol=0.01)
        np.testing.assert_allclose(slope[i], exact_slope, rtol=1e-3, atol=0.01)
    assert value[2] == -jnp.inf
    assert not slope[2].any()


def test_a_likelihood_of_exact_transitions_refuses_an_sde_without(series, key):
    times, x = series
    likelihood = rf.series_likelihood(rf.CoxIngersollRoss(1.0, 1.0, 0.3), times, 1 + x, key=key)
    with pytest.raises(ValueError, match=r"transitions of CKLS have no closed form"):
        likelihood(rf.CKLS(1.0, 1.0, 0.3, 0.5))


@pytest.mark.parametrize(
    "domain", [Domain(), Domain(lower=-1.0), Domain(upper=2.0), Domain(-1.0, 3.0)], ids=repr
)
def test_the_slope_of_a_domain_is_that_of_its_map(domain):
    for free in (-1.3, 0.0, 2.1):
        expected = np.log(jax.grad(domain.from_free)(free))
        np.testing.assert_allclose(domain.log_slope(jnp.asarray(free)), expected, atol=1e-12)


def test_a_posterior_is_likelihood_prior_and_jacobian(series):
    result = rf.fit_sde(rf.OrnsteinUhlenbeck(*POINT), *series, key=jax.random.key(0), num_starts=1)
    posterior = result.posterior(log_prior=lambda sde: -sde.kappa)
    assert (posterior.names, posterior.dimension) == (("kappa", "mu", "sigma"), 3)
    named = posterior.constrain(jnp.stack([posterior.start, posterior.start])[None])
    np.testing.assert_allclose(named["kappa"], np.full((1, 2), result.params["kappa"]))
    kappa, _, sigma = result.estimates  # of these only σ has a bound
    units = posterior.parameters.scale  # of free parameters
    expected = result.log_likelihood - kappa + np.log(sigma) + np.log(units).sum()
    np.testing.assert_allclose(posterior(posterior.start), expected)
    np.testing.assert_allclose(result.posterior()(posterior.start), expected + kappa)
    np.testing.assert_allclose(result.series_likelihood(result.sde), result.log_likelihood)
    slope = np.array([1.0, 1.0, sigma]) * units
    np.testing.assert_allclose(
        posterior.scale @ posterior.scale.T * np.outer(slope, slope), result.covariance
    )
    assert posterior.starts(5, key=jax.random.key(0)).shape == (5, 3)


@pytest.mark.slow
def test_samplers_agree_with_one_another_and_with_maximum_likelihood(series):
    """NUTS of NumPyro, and ours, with one prior."""
    numpyro = pytest.importorskip("numpyro")
    kinds = {"kappa": (1.0, 0.5), "sigma": (0.4, 0.3)}
    prior = {name: numpyro.distributions.LogNormal(np.log(m), s) for name, (m, s) in kinds.items()}
    prior["mu"] = numpyro.distributions.Normal(0.1, 0.1)
    domains = {"kappa": Domain(lower=0.0)}
    result = rf.fit_sde(rf.OrnsteinUhlenbeck(*POINT), *series, key=jax.random.key(0), domains=domains)

    def model():
        values = {name: numpyro.sample(name, distribution) for name, distribution in prior.items()}
        numpyro.factor("series", result.series_likelihood(rf.OrnsteinUhlenbeck(**values)))

    mcmc = numpyro.infer.MCMC(numpyro.infer.NUTS(model), num_warmup=300, num_samples=2000, progress_bar=False)
    mcmc.run(jax.random.key(1))
    theirs = mcmc.get_samples()
    log_prior = lambda sde: sum(jnp.sum(d.log_prob(getattr(sde, name))) for name, d in prior.items())
    posterior = result.posterior(log_prior)
    sde = rf.overdamped_langevin(posterior, 3, scale=posterior.scale)
    starts = posterior.starts(16, key=jax.random.key(2))
    options = {"num_steps": 1000, "burn_in": 200}
    chain = rf.sample_chain(rf.AdjustedSampler(sde, 0.8), starts, key=jax.random.key(3), **options)
    ours = posterior.constrain(chain.samples)
    for name, error in result.standard_errors.items():
        one, other = np.asarray(theirs[name]), np.asarray(ours[name])
        assert abs(one.mean() - other.mean()) < 0.15 * other.std()
        np.testing.assert_allclose(one.std(), other.std(), rtol=0.15)
        assert abs(other.mean() - result.params[name]) < 1.5 * error
