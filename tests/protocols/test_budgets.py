"""Personal budgets: public, reproducible, of the laws of APES's Table 2."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from dovetail.protocols.personal._personal import DISTRIBUTIONS, resolve_budgets

USERS = 40_000
TABLE_2 = {  # range, and the law before clipping
    "uniform1": (0.05, 0.5, [(1.0, stats.uniform(0.05, 0.45))]),
    "uniform2": (0.05, 1.0, [(1.0, stats.uniform(0.05, 0.95))]),
    "gauss1": (0.05, 0.5, [(1.0, stats.norm(0.1, 1))]),
    "gauss2": (0.05, 1.0, [(1.0, stats.norm(0.2, 1))]),
    "mixgauss1": (0.05, 0.5, [(0.9, stats.norm(0.1, 1)), (0.1, stats.norm(0.5, 1))]),
    "mixgauss2": (0.05, 1.0, [(0.9, stats.norm(0.2, 1)), (0.1, stats.norm(1.0, 1))]),
}


def moment(name, power):
    """E[clip(X)^power], by integration."""
    low, high, parts = TABLE_2[name]
    inside = sum(w * integrate.quad(lambda v, law=law: v**power * law.pdf(v), low, high)[0] for w, law in parts)
    return inside + sum(w * (low**power * law.cdf(low) + high**power * law.sf(high)) for w, law in parts)


def test_every_distribution_of_the_table_is_there():
    assert set(DISTRIBUTIONS) == set(TABLE_2)


@pytest.mark.parametrize("name", TABLE_2)
def test_budgets_have_the_law_of_table_2(name):
    """Mean and spread within 4.5 standard errors of their exact values, for 6 laws (alpha below 1e-4)."""
    low, high, parts = TABLE_2[name]
    budgets = np.array(resolve_budgets(name, USERS))
    assert budgets.min() >= low
    assert budgets.max() <= high
    mean, second, fourth = (moment(name, power) for power in (1, 2, 4))
    assert abs(budgets.mean() - mean) < 4.5 * math.sqrt((second - mean**2) / USERS)
    assert abs((budgets**2).mean() - second) < 4.5 * math.sqrt((fourth - second**2) / USERS)
    for end, share in (
        (low, sum(w * law.cdf(low) for w, law in parts)),
        (high, sum(w * law.sf(high) for w, law in parts)),
    ):
        assert abs((budgets == end).mean() - share) <= 4.5 * math.sqrt(share * (1 - share) / USERS), (
            "piled up at an end"
        )


def test_budgets_are_public_constants():
    """The same in every process and on every machine: pinned."""
    np.testing.assert_allclose(
        resolve_budgets("uniform2", 3), [0.13365173202464517, 0.1575120265207675, 0.7124648505222332], rtol=1e-12
    )
    np.testing.assert_allclose(resolve_budgets("mixgauss2", 3), [0.05, 0.05, 0.7167407339726926], rtol=1e-12)
    assert resolve_budgets("gauss2", 10) == resolve_budgets("gauss2", 10)
    assert resolve_budgets("gauss2", 10) == resolve_budgets("gauss2", 50)[:10], (
        "a larger federation changes nobody's budget"
    )


def test_a_pair_is_evenly_spaced():
    assert resolve_budgets([0.05, 1.0], 20) == tuple(np.linspace(0.05, 1.0, 20).tolist())
    assert resolve_budgets((0.5, 0.5), 3) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("given", ["mixgauss1", [0.1, 2.0], (0.3, 0.2, 0.7, 0.1, 0.5)])
def test_what_was_resolved_resolves_to_itself(given):
    once = resolve_budgets(given, 5)
    assert resolve_budgets(once, 5) == once
    pair = resolve_budgets([0.1, 2.0], 2)
    assert resolve_budgets(pair, 2) == pair


def test_a_file_holds_one_budget_a_line(tmp_path):
    file = tmp_path / "budgets.txt"
    file.write_text("0.5\n1.25\n\n3\n")
    assert resolve_budgets(str(file), 3) == (0.5, 1.25, 3.0)
    with pytest.raises(ValueError, match="expected one budget for each of 4 users, got 3"):
        resolve_budgets(str(file), 4)
    file.write_text("0.5\nhalf\n")
    with pytest.raises(ValueError, match=r"expected one number per line in .*budgets\.txt', got 'half'"):
        resolve_budgets(str(file), 2)


@pytest.mark.parametrize("bad", ["0", "-1", "nan", "inf"])
def test_a_budget_that_is_no_budget_is_refused(tmp_path, bad):
    file = tmp_path / "budgets.txt"
    file.write_text(f"0.5\n{bad}\n")
    with pytest.raises(ValueError, match=f"expected every budget to be a finite number > 0, got {float(bad)}"):
        resolve_budgets(str(file), 2)
    with pytest.raises(ValueError, match="expected eps_local"):
        resolve_budgets([0.5, float(bad)], 5)


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ("unifrom2", ValueError, "unknown budgets 'unifrom2': did you mean 'uniform2'?"),
        ("lognormal", ValueError, "unknown budgets 'lognormal': expected one of: gauss1"),
        ("no/such/file", FileNotFoundError, "a file with one number per line, got 'no/such/file', which is not a file"),
        ("budgets.txt", FileNotFoundError, "a file with one number per line, got 'budgets.txt', which is not a file"),
        (0.5, ValueError, "expected budgets as the name of a distribution, .low, high. or a file"),
        ([], ValueError, "expected budgets as the name of a distribution"),
        (["a", "b"], ValueError, "expected eps_local to be a finite number, got eps_local='a'"),
        ([0.1, 0.2, 0.3], ValueError, "expected one budget for each of 7 users, got 3"),
    ],
)
def test_bad_budgets_get_one_sentence(given, error, sentence):
    with pytest.raises(error, match=sentence):
        resolve_budgets(given, 7)
