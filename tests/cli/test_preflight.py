"""Before a run: every way to take part, and settings as a person would type them."""

import json

import pytest

from dovetail.experiment import config
from dovetail.guarantee import quotes
from dovetail.randomness import Randomness
from dovetail.sampling.schedule import Schedule

TERMS = ["--n", "100", "--dim", "10", "--delta", "1e-5", "--rounds", "3"]
NOISE = ["--set", "noise_multiplier=4"]


def certified(command, *words):
    status, out, err = command(*words, "--json")
    assert status == 0, err
    return json.loads(out)["certified"]["eps"]


@pytest.mark.parametrize("kind", ["everyone", "fixed", "poisson", "secret"])
def test_a_quote_is_about_the_cohort_that_a_run_would_have(kind):
    name, size, population = "secagg" if kind == "secret" else "dp_fl", 100, 100 if kind == "everyone" else 1000
    terms = quotes.Terms(num_users=size, dim=10, delta=1e-5, settings={"noise_multiplier": 4.0})
    ((cohort,), protocol) = (
        quotes.guarantee(name, quotes.with_sampling(terms, kind, population)).cohorts,
        quotes.guarantee(name, terms).protocol,
    )
    schedule = Schedule(
        kind=kind, population=population, size=size, rounds=1, randomness=Randomness(0, None),
        min_size=population if protocol.needs_minimum else 0,
    )  # fmt: skip
    assert cohort == schedule.cohort(0)
    assert cohort.population == population
    assert quotes.guarantee(name, quotes.with_sampling(terms, kind, population)).spread.users == population


def test_a_quote_of_users_in_turn_is_about_the_cohort_that_a_run_would_have():
    terms = quotes.Terms(num_users=30, dim=10, delta=1e-5, rounds=10, settings={"noise_multiplier": 4.0})
    turns = quotes.with_sampling(terms, "separated", 100)
    schedule = Schedule(kind="separated", population=100, size=30, rounds=10, randomness=Randomness(0, None))
    assert quotes.guarantee("dp_fl", turns).cohorts == tuple(schedule.cohort(index) for index in range(10))


def test_an_audit_of_users_in_turn_agrees(command):
    """One upload each in 10 rounds: the exact attack, and the code run on a victim that comes once."""
    turns = ["--n", "20", "--population", "200", "--participation", "separated", "--rounds", "10", "--dim", "3"]
    common = [*turns, "--delta", "1e-5", "--set", "noise_multiplier=4"]
    status, out, err = command("audit", "dp_fl", *common, "--trials", "2000", "--json")
    assert status == 0, err
    finding = json.loads(out)
    assert finding["consistent"]
    exact = max(attack["eps_lower"] for attack in finding["attacks"] if not attack["trials"])
    assert 0.99 * finding["certified"]["eps"] < exact
    assert any(attack["trials"] for attack in finding["attacks"])


def test_account_knows_every_way_to_take_part(command):
    curator = ["account", "protocol", "dp_fl", *TERMS, *NOISE]
    everyone = certified(command, *curator, "--participation", "everyone")
    fixed = certified(command, *curator, "--population", "1000", "--participation", "fixed")
    poisson = certified(command, *curator, "--population", "1000", "--participation", "poisson")
    assert certified(command, *curator) == everyone
    assert certified(command, *curator, "--population", "1000") == fixed
    assert poisson < fixed < everyone
    shares = ["account", "protocol", "secagg", *TERMS, *NOISE]
    secret = certified(command, *shares, "--population", "1000", "--participation", "secret")
    assert poisson <= secret < certified(command, *shares)


def test_calibrate_needs_less_noise_for_a_sample(command):
    words = ["calibrate", "dp_fl", *TERMS, "--eps", "1", "--json"]
    values = []
    for more in ([], ["--population", "1000", "--participation", "poisson"]):
        status, out, err = command(*words, *more)
        assert status == 0, err
        assert json.loads(out)["certified"]["eps"] <= 1
        values.append(json.loads(out)["value"])
    assert values[1] < values[0] / 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["dp_fl", "--participation", "poisson"],
            "--participation poisson needs --population, of which --n take part in a round",
        ),
        (
            ["dp_fl", "--participation", "often"],
            "participation to be one of everyone, separated, fixed, poisson, secret",
        ),
        (["dp_fl", "--population", "50"], "expected population >= 100"),
        (
            ["dp_fl", "--population", "1000", "--participation", "everyone"],
            "takes part, population is 100",
        ),
        (["dp_fl", "--population", "1000", "--participation", "secret"], "users of 'dp_fl' cannot decide in secret"),
        (["secagg", "--population", "1000", "--participation", "poisson"], "aggregators see how many users"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(command, words, sentence):
    status, out, err = command("account", "protocol", *words, *TERMS, *NOISE)
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.strip().count("\n") == 0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (".025", 0.025),
        ("-.5", -0.5),
        ("2.", 2.0),
        ("[.1, 2., 3]", [0.1, 2.0, 3]),
        (".5e-3", 0.0005),
        ("0.025", 0.025),
        ("tiny:TASK", "tiny:TASK"),
        ("./.5/data", "./.5/data"),
        ("a.5", "a.5"),
        ("1.2.3", "1.2.3"),
        ("..", ".."),
        ("'.5'", ".5"),
    ],
)
def test_numbers_may_leave_out_a_zero(text, value):
    assert config.parse_override(f"a.b={text}") == ("a.b", value)


BOTH = pytest.mark.parametrize("key", ["clip_norm", "protocol.clip_norm"])


@BOTH
def test_account_calibrate_and_audit_take_both_spellings(command, key):
    given = ["--set", f"{key}=.025"]
    assert certified(command, "account", "protocol", "secagg", *TERMS, *NOISE, *given) > 0
    status, _, err = command("calibrate", "secagg", *TERMS, "--eps", "1", *given)
    assert status == 0, err
    status, _, err = command(
        "audit", "dp_fl", "--n", "20", "--dim", "2", "--trials", "0", *NOISE, *given, "--set", f"{key}=.5"
    )
    assert status == 0, err


@BOTH
def test_a_config_takes_both_spellings(key):
    read = config.read("digits", [("protocol.name", "secagg"), config.parse_override(f"{key}=.025")])
    assert read.protocol["clip_norm"] == 0.025


def test_a_key_of_the_config_comes_first_and_an_unknown_one_is_refused():
    read = config.read("digits", [("protocol.name", "secagg"), ("noise", "seeded")])
    assert read.noise == "seeded"
    assert "noise" not in read.protocol
    with pytest.raises(ValueError, match="unknown config key 'clip_nrom'"):
        config.read("digits", [("clip_nrom", 1.0)])
    with pytest.raises(ValueError, match="unknown key of protocol 'secagg' 'clip_nrom'"):
        quotes.quote("secagg", quotes.Terms(num_users=5, dim=2, delta=0.1, settings={"clip_nrom": 1.0}))


def test_run_takes_a_bare_key_without_a_zero(command, tmp_path):
    words = ["--set", "clip_norm=.025", "--set", "cohort.rounds=2", "--out", str(tmp_path / "out")]
    status, _, err = command("run", "digits", *words)
    assert status == 0, err
    assert "clip_norm = 0.025" in (tmp_path / "out" / "config.toml").read_text()
