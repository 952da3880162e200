"""Named SDEs with hidden components, counts and inputs, from the library and from the command line."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import roughflow as rf
from roughflow.cli import main

ROOM = rf.series.Compartments(
    exchange={"room walls": 0.5, "walls room": 0.1, "walls outside": 0.05},
    gain={"room heating": 2.0},
    sigma={"room": 0.05, "walls": 0.02},
    inputs=("outside", "heating"),
)


def test_compartments_are_the_linear_equations():
    drift = ROOM.drift(0.0, jnp.array([20.0, 15.0]), jnp.array([5.0, 1.0]))
    np.testing.assert_allclose(drift, [0.5 * -5 + 2, 0.1 * 5 + 0.05 * -10], rtol=1e-6)
    np.testing.assert_allclose(ROOM.diffusion(0.0, jnp.zeros(2)), np.diag([0.05, 0.02]), rtol=1e-6)
    with pytest.raises(ValueError, match="'room garden' must be a compartment"):
        rf.series.Compartments({"room garden": 1.0}, {}, {"room": 1.0})


def test_noise_of_infections_moves_both_groups():
    """Nobody is lost: the noise of susceptible and infectious people differs by that of recoveries."""
    sde, z = rf.series.SIR(beta=1.5, gamma=0.5, population=800.0), jnp.array([700.0, 40.0])
    rates = np.array([1.5 * 700 * 40 / 800, 0.5 * 40])
    moves = np.array([[-1, 0], [1, -1]])
    np.testing.assert_allclose(sde.drift(0.0, z), moves @ rates, rtol=1e-6)
    noise = np.asarray(sde.diffusion(0.0, z))
    np.testing.assert_allclose(noise @ noise.T, moves @ np.diag(rates) @ moves.T, rtol=1e-5)


@pytest.mark.parametrize("r", [None, 3.0])
def test_counts_are_those_of_scipy(r):
    found = rf.series.Counts((1,), rate=0.8, dispersion=r)(0.0, jnp.array([7.0, 20.0]))
    known = stats.poisson(16) if r is None else stats.nbinom(r, r / (r + 16))
    y = np.arange(40.0)
    np.testing.assert_allclose(found.log_prob(y), known.logpmf(y), rtol=2e-4)
    np.testing.assert_allclose(found.cdf(y), known.cdf(y) - 0.5 * known.pmf(y), atol=1e-5)


def test_volatility_behind_a_price_has_starting_values():
    truth = rf.Heston(mu=0.05, kappa=4.0, theta=0.04, sigma=0.4, rho=-0.7)
    start = jnp.array([100.0, 0.04])
    path = rf.simulate(truth, start, key=jax.random.key(0), t1=4.0, steps=2016, trajectory=True)
    prices = np.array(path)[::2]
    prices[:, 1] = np.nan
    for kind, level in ((rf.Heston, 0.04), (rf.series.StochasticVolatility, np.log(0.04))):
        found = kind.from_series(np.arange(1009) / 252, prices)
        assert abs(found.theta / level - 1) < 0.5
        assert all(domain.contains(getattr(found, name)) for name, domain in kind.domains.items())
    with pytest.raises(ValueError, match="no starting values if component 1 is hidden"):
        rf.FitzHughNagumo.from_series(np.arange(1009) / 252, prices / 100)


def test_fixed_parameters_keep_their_values():
    x = np.cumsum(np.random.default_rng(0).normal(size=100))
    sde = rf.BrownianMotion(0.25, 2.0)
    result = rf.fit_sde(sde, np.arange(100), x, key=jax.random.key(0), fixed=["mu"], num_starts=1)
    assert result.names == ("sigma",)
    assert result.sde.mu == 0.25
    assert result.params["sigma"] == pytest.approx(np.sqrt(np.mean((np.diff(x) - 0.25) ** 2)), rel=1e-5)
    same = rf.fit_sde(sde, np.arange(100), x, key=jax.random.key(0), fixed="mu", num_starts=1)
    assert same.params == result.params
    for fixed, why in ((["nu"], "no parameter is called nu"), (["mu", "sigma"], "all parameters are fixed")):
        with pytest.raises(ValueError, match=why):
            rf.fit_sde(sde, np.arange(100), x, key=jax.random.key(0), fixed=fixed)


def test_a_varying_rate_is_integrated_out():
    """The marginal likelihood of a panel by the trapezoidal rule, its maximum, and all rates, from a start
    with far too little spread."""
    rng, dt = np.random.default_rng(0), 0.1
    rates, panel = 2 * np.exp(0.6 * rng.normal(size=8)), []
    for rate in rates:
        x, decay = [0.0], np.exp(-rate * dt)
        for noise in rng.normal(size=80):
            x.append(1 + decay * (x[-1] - 1) + 0.5 * np.sqrt((1 - decay**2) / (2 * rate)) * noise)
        panel.append(np.array(x))
    options = {"key": jax.random.key(0), "num_starts": 1, "fixed": ["mu"]}
    options["domains"] = {"kappa": rf.series.Domain(lower=0.0), "sigma": rf.series.Domain(lower=0.0)}
    given = rf.OrnsteinUhlenbeck(1.0, 1.0, 0.4), 8 * [dt * np.arange(81)], panel
    result = rf.fit_sde(*given, varying={"kappa": rf.series.LogNormal(spread=1e-5)}, **options)
    assert result.warning is None

    def known(median, sigma, spread):
        u = np.linspace(-7, 7, 500)
        rate = median * np.exp(spread * u)[:, None]
        decay = np.exp(-rate * dt)
        deviation = sigma * np.sqrt((1 - decay**2) / (2 * rate))
        logs = [stats.norm.logpdf(x[1:], 1 + decay * (x[:-1] - 1), deviation).sum(axis=1) for x in panel]
        return sum(
            np.log(np.trapezoid(np.exp(one - one.max() + stats.norm.logpdf(u)), u)) + one.max()
            for one in logs
        )

    best = np.array([result.params[name] for name in ("kappa", "sigma", "kappa_spread")])
    assert result.log_likelihood == pytest.approx(known(*best), abs=1e-4)
    for move in 1e-2 * np.eye(3):
        assert known(*(best * (1 + move))) < known(*best) > known(*(best * (1 - move)))
    for name, truth in (("kappa", np.exp(np.log(rates).mean())), ("kappa_spread", np.log(rates).std())):
        assert abs(result.params[name] - truth) < 2 * result.standard_errors[name]
    mean, deviation = result.varying["kappa"]
    assert np.all(np.abs(mean - rates) < 4 * deviation)
    drawn = result.forecast(
        [50.0], series=0, key=jax.random.key(0), num_paths=2000, parameter_uncertainty=True
    )
    assert drawn.std() == pytest.approx(0.5 / np.sqrt(2 * rates[0]), rel=0.3)
    assert result.likelihood_ratio(rf.fit_sde(*given, **options))[1] < 0.05
    with pytest.raises(ValueError, match="residuals require the same parameters"):
        result.residuals(key=jax.random.key(0))


@pytest.fixture
def heated(tmp_path):
    """Files of a heated room, with a missing temperature, and of the weather."""
    rng, dt, x, hours = np.random.default_rng(0), 0.1, np.array([18.0, 15.0]), np.arange(0, 30, 0.5)
    weather = np.column_stack([5 + 3 * np.sin(hours / 4), np.sin(hours) > 0])
    rows = []
    for u in weather:
        rows.append(f"{x[0]:.6f}")
        for _ in range(5):
            x = x + dt * np.asarray(ROOM.drift(0.0, x, u)) + np.sqrt(dt) * rng.normal(size=2) * [0.05, 0.02]
    rows[10] = "NA"
    lines = lambda head, *columns: "\n".join(
        [head, *(",".join(map(str, row)) for row in zip(*columns, strict=True))]
    )
    (tmp_path / "room.csv").write_text(lines("hour,room", hours, rows))
    (tmp_path / "weather.csv").write_text(lines("hour,outside,heating", hours, *weather.T))
    return tmp_path


def test_a_heated_room_from_the_command_line(heated, capsys):
    terms = "exchange.room walls=0.4,exchange.walls room=0.1,exchange.walls outside=0.05,gain.room heating=1"
    command = ["estimate", str(heated / "room.csv"), "--time", "hour", "--value", "room", "--hidden", "walls"]
    command += ["--model", "compartments", "--inputs", str(heated / "weather.csv"), "--fix"]
    command += ["sigma.walls,exchange.walls room,exchange.walls outside"]
    command += ["--start", terms + ",sigma.room=0.1,sigma.walls=0.02", "--json", str(heated / "fit.json")]
    assert main(command) == 0
    assert "Kalman filter" in capsys.readouterr().out
    found = json.loads((heated / "fit.json").read_text())
    assert found["series"]["missing"] == 1
    for name, value in (("gain.room heating", 2.0), ("exchange.room walls", 0.5), ("sigma.room", 0.05)):
        assert abs(found["params"][name] - value) < 4 * found["standard_errors"][name]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            ["--model", "heston", "--hidden", "recovery"],
            "components of the model, price, variance; got recovery",
        ),
        (["--model", "heston"], "--value must name a column for price, variance"),
        (["--model", "fitzhugh-nagumo", "--hidden", "recovery"], "set --start epsilon=…,s=…"),
        (["--model", "vasicek", "--start", "speed=1"], "--start takes kappa, mu, sigma; got speed"),
        (["--model", "vasicek", "--observe", "poisson", "--initial", "level=1"], "--initial needs value=…"),
        (["--model", "compartments"], "--inputs FILE is missing"),
        (["--compare", "--hidden", "variance"], "--compare is available only for models with one observed"),
    ],
)
def test_bad_options_of_hidden_series_are_refused_in_one_line(options, why, heated, capsys):
    assert main(["estimate", str(heated / "room.csv"), "--time", "hour", "--value", "room", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert why in said.err
