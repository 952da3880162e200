"""What is modelled: the correction between the two calculi, structured noise, networks."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from problems import PROBLEMS, gbm_1d, gbm_2d, nonlinear_3d

import roughflow as rf
from roughflow.sde import noise_dimension, noise_matrix
from roughflow.sde._correction import spread_at
from roughflow.sde._networks import tanh
from roughflow.sde._noise import depends_on, diagonal_slopes, is_entrywise

T0 = jnp.asarray(0.4)
STATE_DEPENDENT = [gbm_1d(), gbm_2d(), nonlinear_3d()]


def rectangular(rows, columns):
    """A small network whose output is a rows x columns matrix."""
    rng = np.random.default_rng(0)
    inner, outer = rng.normal(size=(rows, 5)), rng.normal(size=(5, rows * columns))
    return lambda t, z: jnp.reshape(jnp.tanh(z @ inner + t) @ outer, (rows, columns))


@jax.custom_jvp
def shift(z):
    return jnp.sin(z)


shift.defjvps(lambda tangent, _, z: tangent * jnp.cos(z))


def dense_correction(diffusion, t, z):
    """½ Σⱼ (Dσⱼ) σⱼ from the whole Jacobian of the whole matrix."""
    jacobian = jax.jacfwd(lambda y: noise_matrix(diffusion(t, y)))(z)
    return 0.5 * jnp.einsum("ijk,kj->i", jacobian, noise_matrix(diffusion(t, z)))


@eqx.filter_jit
def at_points(function, z):
    return jax.vmap(function, in_axes=(None, 0))(T0, z)


def points(dimension, key, count=7):
    return jax.random.normal(key, (count, dimension))


# ----------------------------------------------------------------------------- the correction


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_converted_drift_is_the_one_written_by_hand(problem, key):
    z = points(problem.x.shape[1], key)
    for got, expected in (
        (rf.to_stratonovich(problem.ito), problem.stratonovich),
        (rf.to_ito(problem.stratonovich), problem.ito),
    ):
        np.testing.assert_allclose(at_points(got.drift, z), at_points(expected.drift, z), atol=1e-13)


@pytest.mark.parametrize(("rows", "columns"), [(4, 2), (2, 11), (9, 12)])
def test_correction_of_a_network_is_the_dense_formula(rows, columns, key):
    """More rows than columns or fewer, up to 8 of them or more: each is computed in a way of its own."""
    diffusion = rectangular(rows, columns)
    sde = rf.ItoSDE(lambda t, z: 0 * z, diffusion)
    both = lambda z: (rf.to_stratonovich(sde).drift(T0, z), dense_correction(diffusion, T0, z))
    got, expected = jax.jit(both)(points(rows, key, 1)[0])
    assert jnp.max(jnp.abs(expected)) > 1e-3
    np.testing.assert_allclose(got, -expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dimension", [3, 10])
def test_correction_of_a_diagonal_operator_is_that_of_the_dense_matrix(dimension, key):
    """For a diagonal whose entries depend on every coordinate."""
    network = rf.MLP(dimension, dimension, 8, 1, key=key)
    drift = lambda t, z: -z
    diagonal = rf.ItoSDE(drift, lambda t, z: lx.DiagonalLinearOperator(1 + network(t, z)))
    dense = rf.ItoSDE(drift, lambda t, z: jnp.diag(1 + network(t, z)))
    z = points(dimension, key)
    drifts = [at_points(rf.to_stratonovich(s).drift, z) for s in (diagonal, dense)]
    assert jnp.max(jnp.abs(drifts[1] + z)) > 1e-2
    np.testing.assert_allclose(drifts[0], drifts[1], atol=1e-13)


def test_flow_with_a_diagonal_operator_is_the_dense_one(key):
    network = rf.MLP(2, 2, 8, 1, key=key)
    grid = rf.FixedGrid(diffrax.Heun(), steps=4)
    diffusions = (
        lambda t, z: lx.DiagonalLinearOperator(1 + network(t, z)),
        lambda t, z: jnp.diag(1 + network(t, z)),
    )
    values = []
    for diffusion in diffusions:
        sde = rf.ItoSDE(lambda t, z: -z, diffusion)
        flow = rf.StochasticFlow(sde, rf.Normal(jnp.zeros(2)), integrator=grid)
        values.append(flow.log_prob_given_path(points(2, key), flow.sample_path(key=key)))
    np.testing.assert_allclose(values[0], values[1], rtol=1e-12)


def test_any_lineax_operator_will_do(key):
    """A tridiagonal operator, which has no code of its own."""
    bands = lambda z: (2 + jnp.sin(z), jnp.cos(z[:-1]), z[1:] ** 2)
    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: lx.TridiagonalLinearOperator(*bands(z)))
    z = points(4, key)
    expected = -z - at_points(lambda t, y: dense_correction(sde.diffusion, t, y), z)
    np.testing.assert_allclose(at_points(rf.to_stratonovich(sde).drift, z), expected, atol=1e-13)


@pytest.mark.parametrize(
    ("diffusion", "expected"),
    [
        (lambda t, z: jnp.eye(3), False),
        (lambda t, z: jnp.exp(-t) * jnp.eye(3), False),
        (lambda t, z: lx.DiagonalLinearOperator(jnp.cos(t) * jnp.ones(3)), False),
        (rf.ConstantDiffusion(jnp.ones((3, 2))), False),
        (rf.sde.NoDiffusion(), False),
        (lambda t, z: z[:, None], True),
        (lambda t, z: jnp.broadcast_to(jnp.linalg.norm(z), (3, 1)), True),
        (lambda t, z: lx.DiagonalLinearOperator(z), True),
        (lambda t, z: jax.jit(jnp.diag)(shift(z)), True),
        (lambda t, z: jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y), z)[:, None], True),
    ],
    ids=["eye", "time", "diagonal time", "constant", "none", "linear", "norm", "diagonal", "jit", "loop"],
)
def test_dependence_on_the_state_is_seen(diffusion, expected):
    assert depends_on(lambda z: diffusion(T0, z), jnp.ones(3)) is expected


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (lambda z: jnp.sqrt(1 + z**2), True),
        (lambda z: jax.nn.softplus(jnp.where(z > 0, z, jnp.arange(3.0))), True),
        (lambda z: jnp.arange(3.0), True),
        (lambda z: z + z[::-1], False),
        (lambda z: jnp.sin(z) * jnp.sum(z), False),
        (lambda z: jax.jit(lambda y: jnp.roll(y, 1) * y)(z), False),
        (lambda z: jnp.ones((3, 3)) @ z, False),
    ],
    ids=["root", "softplus", "constant", "reversed", "sum", "jit", "product"],
)
def test_a_diagonal_that_depends_on_a_coordinate_each_takes_one_product(entries, expected, key):
    """Either way the drift's terms are right; the program has a product for each direction or one for all."""
    assert is_entrywise(entries, jnp.ones(3)) is expected
    noise = lambda y: lx.DiagonalLinearOperator(entries(y))
    slope = jnp.array([1.0, -2, 0.5])

    @jax.jit
    @jax.vmap
    def both_ways(z):
        drifts = [spread_at(way, z).drift(slope, 0.7) for way in (noise, lambda y: jnp.diag(entries(y)))]
        dense = dense_correction(lambda t, x: noise(x), T0, z)
        return *drifts, rf.sde.ExactCorrection()(noise, z, None)[1], dense

    drift, dense_drift, correction, dense = both_ways(points(3, key))
    np.testing.assert_allclose(drift, dense_drift, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(correction, dense, atol=1e-13)
    size = len(jax.make_jaxpr(lambda y: diagonal_slopes(noise, y))(jnp.ones(3)).jaxpr.eqns)
    assert (size < 20) is expected


def test_no_work_where_the_diffusion_does_not_depend_on_the_state():
    """The traced program has no equations per column for σ(t), and has them for σ(z)."""

    def size(diffusion):
        drift = rf.to_stratonovich(rf.ItoSDE(lambda t, z: -z, diffusion)).drift
        return len(jax.make_jaxpr(drift)(T0, jnp.ones(6)).jaxpr.eqns)

    of_time = [size(lambda t, z, m=m: jnp.cos(t) * jnp.ones((6, m))) for m in (1, 6)]
    constant = [size(rf.ConstantDiffusion(jnp.ones((6, m)))) for m in (1, 6)]
    of_state = [size(lambda t, z, m=m: jnp.cos(z)[:, None] * jnp.ones((6, m))) for m in (1, 6)]
    assert of_time[0] == of_time[1]
    assert constant[0] == constant[1]
    assert of_state[1] > of_state[0] + 5
    unmoved = rf.to_stratonovich(rf.ItoSDE(lambda t, z: -z, rf.ConstantDiffusion(jnp.ones((3, 2)))))
    np.testing.assert_array_equal(unmoved.drift(T0, jnp.arange(3.0)), -jnp.arange(3.0))


# ------------------------------------------------------------------- the calculus is the type


@pytest.mark.parametrize("problem", STATE_DEPENDENT, ids=lambda p: p.name)
def test_there_and_back_again(problem, key):
    z = points(problem.x.shape[1], key)
    for sde, again in (
        (problem.ito, rf.to_ito(rf.to_stratonovich(problem.ito))),
        (problem.stratonovich, rf.to_stratonovich(rf.to_ito(problem.stratonovich))),
    ):
        for part in ("drift", "noise"):
            got, expected = (at_points(getattr(s, part), z) for s in (again, sde))
            np.testing.assert_allclose(got, expected, atol=1e-13)


def test_calculus_is_a_type():
    problem = gbm_1d()
    assert type(rf.to_stratonovich(problem.ito)) is rf.StratonovichSDE
    assert type(rf.to_ito(problem.stratonovich)) is rf.ItoSDE
    assert rf.to_stratonovich(problem.stratonovich) is problem.stratonovich
    assert rf.to_ito(problem.ito) is problem.ito


def test_noise_dimension():
    assert [noise_dimension(p.ito, p.x.shape[1]) for p in PROBLEMS] == [1, 3, 2, 1, 2, 2]
    assert noise_dimension(rf.ItoSDE(lambda t, z: z, rf.sde.NoDiffusion()), 3) == 0


# --------------------------------------------------------------------- one product, on average


def test_sampled_correction_is_right_on_average(key):
    """Over 4000 keys within three standard errors of the exact one; and it does vary."""
    sde = nonlinear_3d().ito
    z = jnp.array([0.3, -0.8, 0.5])
    exact = rf.to_stratonovich(sde).drift(T0, z)
    estimate = lambda k: rf.to_stratonovich(sde, key=k).drift(T0, z)
    drifts = np.asarray(jax.jit(jax.vmap(estimate))(jax.random.split(key, 4000)))
    spread = drifts.std(axis=0, ddof=1)
    assert np.all(spread > 1e-3)
    assert np.all(np.abs(drifts.mean(axis=0) - exact) < 3 * spread / np.sqrt(4000))
    assert np.max(np.abs(exact - sde.drift(T0, z))) > 10 * np.max(spread) / np.sqrt(4000)
    back = rf.to_ito(rf.to_stratonovich(sde), key=key)
    assert not np.allclose(back.drift(T0, z), sde.drift(T0, z))


def test_sampled_correction_is_exact_for_noise_of_each_coordinate_alone(key):
    """σ = diag(sᵢ(zᵢ)): the signs cancel."""
    sde = rf.ItoSDE(lambda t, z: -z, lambda t, z: lx.DiagonalLinearOperator(1 + 0.5 * jnp.sin(z)))
    z = points(5, key, 1)[0]
    exact = -z - 0.25 * (1 + 0.5 * jnp.sin(z)) * jnp.cos(z)
    np.testing.assert_allclose(rf.to_stratonovich(sde, key=key).drift(T0, z), exact, rtol=1e-12)


def test_a_sampled_correction_that_would_change_the_distribution_is_not_taken(key):
    """Signs that stay fixed along a path change the distribution, unless all give the same correction."""
    problem = nonlinear_3d()
    with pytest.warns(UserWarning, match=r"^SampledCorrection would change the distribution"):
        flow = rf.StochasticFlow(problem.ito, problem.base, correction=rf.sde.SampledCorrection())
    assert isinstance(flow.correction, rf.sde.ExactCorrection)
    alone = rf.ItoSDE(lambda t, z: -z, lambda t, z: lx.DiagonalLinearOperator(1 + 0.5 * jnp.sin(z)))
    flow = rf.StochasticFlow(alone, problem.base, correction=rf.sde.SampledCorrection())
    assert isinstance(flow.correction, rf.sde.SampledCorrection)
    with pytest.raises(TypeError, match=r"SampledCorrection.*key=jax\.random\.key"):
        flow.log_prob_given_path(jnp.zeros((2, 3)), flow.sample_path(key=key))


# --------------------------------------------------------------------------------- networks


def test_mlp_shape_scale_and_time(key):
    z, later = jnp.ones(3), jnp.asarray(0.9)
    still = rf.MLP(3, 2, 8, 2, key=key)
    assert still(T0, z).shape == (2,)
    assert [w.shape for w in still.weights] == [(3, 8), (8, 8), (8, 2)]
    np.testing.assert_array_equal(still(T0, z), still(later, z))
    moving = rf.MLP(3, 2, 8, 2, time_dependent=True, key=key)
    assert not np.allclose(moving(T0, z), moving(later, z))
    small = rf.MLP(3, 2, 8, 2, scale=0.01, key=key)
    np.testing.assert_allclose(small(T0, z), 0.01 * still(T0, z), rtol=1e-12)
    by_hand = jnp.tanh(jnp.tanh(z @ still.weights[0]) @ still.weights[1]) @ still.weights[2]
    np.testing.assert_allclose(still(T0, z), by_hand, rtol=1e-12)


def test_full_diffusion_has_ones_on_the_diagonal_and_row_major_entries_off_it(key):
    diffusion = rf.FullDiffusion(3, 8, scale=0.2, key=key)
    z = points(3, key, 1)[0]
    a, b, c, d, e, f = diffusion.network(T0, z)
    expected = 0.2 * np.array([[1, a, b], [c, 1, d], [e, f, 1]])
    np.testing.assert_allclose(diffusion(T0, z), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="DiagonalDiffusion"):
        rf.FullDiffusion(1, key=key)


def test_diagonal_diffusion_is_positive(key):
    diffusion = rf.DiagonalDiffusion(4, key=key)
    z = 10 * points(4, key, 200)
    diagonals = at_points(lambda t, y: lx.diagonal(diffusion(t, y)), z)
    assert diagonals.shape == (200, 4)
    assert np.min(diagonals) > 0
    expected = np.log1p(np.exp(at_points(diffusion.network, z)))
    np.testing.assert_allclose(diagonals, expected, rtol=1e-10)


def test_constant_and_no_diffusion(key):
    matrix = jax.random.normal(key, (3, 2))
    diffusion = rf.ConstantDiffusion(matrix)
    np.testing.assert_array_equal(diffusion(T0, jnp.ones(3)), matrix)
    assert rf.sde.NoDiffusion()(T0, jnp.ones(3)).shape == (3, 0)
    np.testing.assert_array_equal(
        noise_matrix(rf.ConstantDiffusion(jnp.arange(3))(T0, jnp.ones(3))), np.diag(range(3))
    )
    with pytest.raises(ValueError, match=r"\(d, m\), or \(d,\) if diagonal, got \(\)"):
        rf.ConstantDiffusion(jnp.ones(()))


def test_no_diffusion_is_an_ordinary_flow(key):
    """dz = −z dt from N(0, 1): the density at T = 1 is that of N(0, e⁻²)."""
    flow = rf.StochasticFlow(rf.ItoSDE(lambda t, z: -z, rf.sde.NoDiffusion()), rf.Normal(jnp.zeros(2)))
    x = points(2, key)
    value = flow.log_prob_given_path(x, flow.sample_path(key=key))
    expected = rf.Normal(jnp.zeros(2), np.exp(-1.0)).log_prob(x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "hard_tanh", "relu6"])
def test_activations_with_a_corner_are_refused(name, key):
    with pytest.raises(ValueError, match=f"{name} has a discontinuous derivative.*softplus") as caught:
        rf.MLP(2, 2, activation=getattr(jax.nn, name), key=key)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "activation",
    [jnp.tanh, jax.nn.softplus, jax.nn.silu, jax.nn.gelu, jnp.sin, tanh],
    ids=lambda f: f.__name__,
)
def test_smooth_activations_are_accepted(activation, key):
    network = rf.MLP(2, 2, 4, 1, activation=activation, key=key)
    z = jnp.array([0.5, -1.0])
    np.testing.assert_allclose(
        network(T0, z), activation(z @ network.weights[0]) @ network.weights[1], rtol=1e-12
    )


def test_tanh_has_the_derivatives_of_tanh():
    x = jnp.linspace(-4, 4, 41)
    ours, theirs = tanh, jnp.tanh
    for _ in range(4):
        np.testing.assert_allclose(jax.vmap(ours)(x), jax.vmap(theirs)(x), rtol=1e-11, atol=1e-13)
        ours, theirs = jax.grad(ours), jax.grad(theirs)


class Geometric(rf.sde.AbstractStratonovichSDE):
    """dZ = a Z dt + b Z ∘ dB, as a user may write it."""

    a: float
    b: float

    @property
    def drift(self):
        return lambda t, z: self.a * z

    @property
    def diffusion(self):
        return lambda t, z: self.b * z[:, None]


def test_an_sde_of_ones_own_is_read_in_the_calculus_of_its_class(key):
    z = jnp.array([2.0])
    assert rf.to_stratonovich(Geometric(0.1, 0.3)).drift(0.0, z) == pytest.approx(0.2)
    assert rf.to_ito(Geometric(0.1, 0.3)).drift(0.0, z) == pytest.approx(0.2 + 0.045 * 2)
    flow = rf.StochasticFlow(Geometric(0.1, 0.3), rf.Normal(jnp.ones(1)))
    same = rf.StochasticFlow(rf.StratonovichSDE(flow.sde.drift, flow.sde.diffusion), flow.base)
    path = flow.sample_path(key=key)
    np.testing.assert_allclose(flow.log_prob_given_path(z, path), same.log_prob_given_path(z, path))


def test_an_sde_without_a_calculus_is_refused():
    class Neither(rf.AbstractSDE):
        drift: Any
        diffusion: Any

    with pytest.raises(TypeError, match="must be an ItoSDE or StratonovichSDE, got Neither"):
        rf.StochasticFlow(Neither(lambda t, z: z, lambda t, z: z[:, None]), rf.Normal(jnp.zeros(1)))
