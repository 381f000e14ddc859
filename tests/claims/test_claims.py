import ast
import inspect
import json
import math
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom, laplace

import dovetail.accounting
from dovetail.accounting import gaussian
from dovetail.claims import Claim, PrintedNumber, apes, flame, geyer, subdp, survey
from dovetail.events import (
    Disjoint,
    FixedSize,
    Gaussian,
    PaddedBernoulli,
    PaddedTopk,
    Personalized,
    Poisson,
    Report,
    Round,
    Shuffled,
)
from dovetail.protocols import PROTOCOLS, Claimed
from dovetail.statements import Neighbors, NotApplicable, Scope, Statement, Theorem, Trust, Unit, Verdict

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "published.json").read_text())
CLAIMED = {name: cls for name, cls in PROTOCOLS.items() if issubclass(cls, Claimed)}
HOLDS, UNPROVEN, REFUTED = Verdict.CLAIMED_HOLDS, Verdict.CLAIMED_UNPROVEN, Verdict.CLAIMED_REFUTED


def agrees(value: float, golden: dict, rel: float = 1e-3) -> None:
    """The recomputed value, and the printed one up to rounding or truncation of its last digit."""
    assert value == pytest.approx(golden["recomputed"], rel=rel)
    shown = Decimal(golden["printed"])
    digits = Decimal(1).scaleb(shown.as_tuple().exponent)
    assert shown in {Decimal(value).quantize(digits, rounding) for rounding in (ROUND_DOWN, ROUND_HALF_UP)}


# --- FLAME ------------------------------------------------------------------------------------------------------------

F = GOLDEN["flame"]
DIM, USERS, DELTA = F["setting"]["coordinates"], F["setting"]["num_users"], F["setting"]["delta"]


def simple(kind: str = "laplace", eps_local: float = 0.01, dim: int = DIM) -> Shuffled:
    return Shuffled(report=Report(kind=kind, eps_local=eps_local), num_users=USERS, coordinates=dim)


def topk(top: int = 157, pad_to: int = 333, kind: str = "laplace") -> PaddedTopk:
    report = Report(kind=kind, eps_local=0.5)
    return PaddedTopk(report=report, num_users=USERS, pad_to=pad_to, top=top, coordinates=DIM, decoys=0)


def test_flame_ss_simple():
    claim = flame.ss_simple(simple(), delta=DELTA)
    agrees(claim.eps, F["ss_simple"], rel=2e-5)
    assert (claim.delta, claim.verdict) == (DELTA, REFUTED)
    assert flame.ss_simple(simple("rr"), delta=DELTA).eps == claim.eps  # every printed number is for Laplace reports
    assert flame.ss_simple(simple("rr"), delta=DELTA, evaluation="own").eps == pytest.approx(0.9117, rel=1e-3)


def test_flame_ss_double_and_topk():
    claim = flame.ss_topk(topk(), delta=DELTA)
    agrees(claim.eps, F["ss_double"], rel=1e-4)
    assert claim.verdict is REFUTED
    agrees(flame.ss_topk(topk(), delta=DELTA, subsampled=False).eps, F["shuffle_only"], rel=1e-5)
    double = PaddedBernoulli(
        report=Report(kind="rr", eps_local=0.5), num_users=USERS, pad_to=333, inclusion=0.02, coordinates=DIM
    )
    assert flame.ss_double(double, delta=DELTA).eps == pytest.approx(claim.eps, rel=1e-9)
    agrees(flame.ss_double(double, delta=DELTA, subsampled=False).eps, F["shuffle_only"], rel=1e-5)


def test_flame_one_tenth_of_the_coordinates():
    event = topk(top=F["tenth"]["top"], pad_to=666)
    claim = flame.ss_topk(event, delta=DELTA, pad_to=USERS / F["tenth"]["users_over_pad"])
    agrees(claim.eps, F["tenth"], rel=2e-5)


def test_flame_index_privacy():
    figure = flame.theorem5(num_users=USERS, pad_to=USERS / 3, beta=0.02)
    assert figure.value == float(F["index_privacy"]["printed"])
    assert f"l = {F['index_privacy']['messages']}" in figure.quantity
    least, most = flame.messages_range(nu=figure.value, beta=0.02)
    assert (least.value, most.value) == (16, 50)
    assert flame.theorem5(num_users=USERS, pad_to=USERS, beta=0.02).value == 1
    with pytest.raises(NotApplicable, match="no index privacy"):
        flame.theorem5(num_users=USERS, pad_to=39, beta=0.02)


def test_flame_lemma1_is_the_reference_value_and_knows_its_range():
    claim = flame.lemma1(eps_local=1.0, levels=2, num_users=1000, delta=1e-6)
    assert claim.eps == pytest.approx(0.86949291, rel=1e-7)
    assert claim.verdict is HOLDS
    assert flame.lemma1(eps_local=1.0, levels=2, num_users=1000, delta=0.9).verdict is UNPROVEN
    with pytest.raises(NotApplicable, match="central eps <= 1"):
        flame.lemma1(eps_local=2.0, levels=2, num_users=1000, delta=1e-6)


def test_flame_composition_as_printed():
    claim = flame.theorem1(eps_each=0.01, delta_each=1e-9, coordinates=100)
    advanced = 0.01 * math.sqrt(200 * math.log(1e9)) + 100 * 0.01 * math.expm1(0.01)
    assert claim.eps == pytest.approx(min(1.0, advanced))
    assert claim.delta == pytest.approx(101e-9)
    assert flame.theorem1(eps_each=3.0, delta_each=1e-9, coordinates=2).eps == 6.0
    assert flame.theorem4(eps_each=0.01, delta_each=1e-9, selected=50).eps == claim.eps
    assert claim.verdict is REFUTED
    alone = flame.theorem1(eps_each=0.01, delta_each=1e-9, coordinates=100, linkage="coordinate")
    assert alone.verdict is HOLDS


def test_flame_corollary_1_scales_as_printed():
    claim = flame.corollary1(eps_local=0.5, num_users=1000, delta=1e-6)
    assert claim.eps == pytest.approx(0.5 * math.exp(0.5) * math.sqrt(math.log(1e6) / 1000))
    assert claim.verdict is UNPROVEN


def difference_law(others: int, up: float, down: float, size: int = 1 << 14) -> np.ndarray:
    """Law of (#up - #down) over independent reports, by its characteristic function; index 0 is in the middle."""
    angle = 2 * np.pi * np.arange(size) / size
    one = 1 - up - down + up * np.exp(1j * angle) + down * np.exp(-1j * angle)
    return np.fft.fftshift(np.maximum(np.fft.fft(one**others).real / size, 0))


def delta_of_difference(law: np.ndarray, up: float, down: float, eps: float) -> float:
    """Exact delta between a victim that goes up (else down) with these probabilities and its mirror image."""
    ahead, behind = np.roll(law, 1), np.roll(law, -1)
    p = up * ahead + down * behind + (1 - up - down) * law
    q = down * ahead + up * behind + (1 - up - down) * law
    return float(np.maximum(p - math.exp(eps) * q, 0).sum())


@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_flame_bennett_is_below_an_exact_lower_bound(delta):
    claim = flame.bennett(Report(kind="laplace", eps_local=1.0), num_users=4000, delta=delta)
    law = difference_law(3999, laplace.sf(0.7, 0, 1), laplace.cdf(0.3, 0, 1))  # the others hold 0
    exact = delta_of_difference(law, laplace.sf(0.7, 1, 1), laplace.cdf(0.3, 1, 1), claim.eps)
    assert exact > 1.5 * delta
    assert claim.verdict is REFUTED


def test_flame_whole_messages_are_linkable():
    """Thm. 1 against a message with many ones: 2000 coordinates, 1000 users, eps_local .5, neutral neighbours."""
    dim, delta = 2000, 5e-6
    claim = flame.ss_simple(simple("rr", 0.5, dim), delta=delta, evaluation="own", linkage="vector")
    prob, ones = 1 / (1 + math.exp(-0.5)), 1245
    seen = binom.sf(ones - 1, dim, prob)
    spurious = 999 * binom.sf(ones - 1, dim, 0.5) + binom.sf(ones - 1, dim, 1 - prob)
    assert math.log((seen - delta) / spurious) > claim.eps
    assert claim.verdict is REFUTED


def test_flame_ss_double_as_printed_is_linkable():
    """Counting messages with at least 123 ones of 157 shows eps >= 7.36."""
    prob, messages = 1 / (1 + math.exp(-0.5)), 333 * DIM // 157 - 1
    seen, spurious = binom.sf(122, 157, prob), messages * binom.sf(122, 157, 0.5) + binom.sf(122, 157, 1 - prob)
    lower = math.log((seen - DELTA) / spurious)
    assert lower == pytest.approx(7.36, abs=0.01)
    assert flame.ss_topk(topk(kind="rr"), delta=DELTA, evaluation="own").eps < 0.3 < lower


def test_flame_ss_topk_is_below_an_exact_lower_bound():
    """157 reports of one sign or the other among fair coins: the number of ones alone shows more than is claimed."""
    claim = flame.ss_topk(topk(kind="rr"), delta=DELTA, evaluation="own")
    prob, coins = 1 / (1 + math.exp(-0.5)), 157 * 332
    noise = binom.pmf(np.arange(coins + 1), coins, 0.5)
    plus, minus = (np.convolve(noise, binom.pmf(np.arange(158), 157, x)) for x in (prob, 1 - prob))
    assert claim.eps < 0.26
    assert np.maximum(plus - math.exp(1.3) * minus, 0).sum() > DELTA
    assert claim.verdict is REFUTED


# --- APES -------------------------------------------------------------------------------------------------------------

A = GOLDEN["apes"]
BUDGETS = tuple(np.linspace(A["setting"]["low"], A["setting"]["high"], A["setting"]["num_users"]).tolist())
UNIFORM2 = Personalized(kind="clip_laplace", eps_locals=BUDGETS, coordinates=A["setting"]["coordinates"])
DELTA_UC = A["setting"]["delta"]


def test_apes_table_3_dimension_level():
    agrees(apes.unis_numerical(BUDGETS).eps, A["unis_each"], rel=1e-5)
    agrees(apes.echo_numerical(BUDGETS).eps, A["apes_each"], rel=1e-4)
    one = Personalized(kind="clip_laplace", eps_locals=BUDGETS)
    assert apes.apes(one, delta=1e-8) == apes.echo_numerical(BUDGETS)
    assert apes.unis(one, delta=1e-8) == apes.unis_numerical(BUDGETS)


@pytest.mark.parametrize("name", ["apes", "unis", "s_apes", "ldp_min", "pldp"])
def test_apes_table_3_user_level(name):
    more = {"kept": A["setting"]["kept"]} if name == "s_apes" else {}
    claim = CLAIMED[name].formula(UNIFORM2, delta=DELTA_UC, **more)
    agrees(claim.eps, A[name])
    assert claim.delta == 0 if name == "pldp" else claim.delta == pytest.approx(DELTA_UC, rel=0.01)
    verdicts = {"apes": REFUTED, "unis": UNPROVEN, "s_apes": REFUTED, "ldp_min": HOLDS, "pldp": HOLDS}
    assert claim.verdict is verdicts[name]


def test_apes_slack_of_s_apes_is_what_the_coordinates_leave():
    each = math.tanh(0.5) * 1e-8
    assert DELTA_UC - 2 * A["setting"]["kept"] * each == pytest.approx(A["s_apes"]["delta_slack"], rel=1e-3)
    direct = apes.proposition1(eps_each=0.0575, delta_each=each, kept=1570, delta_slack=A["s_apes"]["delta_slack"])
    agrees(direct.eps, A["s_apes"])


def test_apes_closed_form_is_not_what_the_table_shows():
    assert apes.theorem4(BUDGETS).eps == pytest.approx(A["theorem4"], rel=1e-3)
    assert apes.theorem4(BUDGETS).delta == pytest.approx(math.tanh(0.5) * 1e-8)
    assert apes.equation2(BUDGETS, delta=1e-8).verdict is UNPROVEN
    assert apes.equation2((1.0,) * 10000, delta=1e-6).verdict is HOLDS


def clip_laplace_tail(eps: float, x: float, width: float) -> float:
    """P(report > C - width) for Clip-Laplace at x on [-1, 1]."""
    scale = 2 / eps
    mass = laplace.cdf(1, x, scale) - laplace.cdf(-1, x, scale)
    return float((laplace.cdf(1, x, scale) - laplace.cdf(1 - width, x, scale)) / mass)


@pytest.mark.parametrize(
    ("eps_victim", "width", "shown", "numerical"), [(8.0, 0.32, 0.118, True), (100.0, 0.026, 0.43, False)]
)
def test_apes_averaging_over_budgets_is_below_an_exact_lower_bound(eps_victim, width, shown, numerical):
    budgets = (eps_victim,) + (A["victim"]["eps_others"],) * 9999
    claim = apes.echo_numerical(budgets) if numerical else apes.theorem4(budgets)
    other = clip_laplace_tail(A["victim"]["eps_others"], 0.0, width)
    up, down = (clip_laplace_tail(eps_victim, x, width) for x in (1.0, -1.0))
    assert delta_of_difference(difference_law(9999, other, other), up, down, shown) > claim.delta
    assert claim.eps < shown
    assert claim.verdict is REFUTED
    if numerical:
        assert claim.eps == pytest.approx(A["victim"]["recomputed"], abs=1e-4)


def test_apes_echoes_by_sorting_are_the_double_sum():
    rng = np.random.default_rng(0)
    budgets = rng.uniform(0.05, 3, 60)
    first = int(np.argmax(budgets))
    r = -np.expm1(-budgets) / budgets
    larger = np.maximum.outer(budgets, budgets)
    p = np.delete(np.multiply.outer(1 / r, r) * np.exp(-larger) / 60, first, axis=0).ravel()  # Lemma 4
    mean, spread = apes.echo_moments(budgets)
    assert mean == pytest.approx(math.fsum(p))
    assert spread == pytest.approx(math.sqrt(math.fsum(x * (1 - x) for x in p)))


# --- Geyer ------------------------------------------------------------------------------------------------------------


def noisy(prob: float, noise: float, participation: object = None) -> Round:
    mechanism = Gaussian(std=noise, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE)
    return Round(mechanism=mechanism, participation=participation or Poisson(prob=prob))


@pytest.mark.parametrize("case", GOLDEN["geyer"], ids=lambda case: f"K={case['clients']}")
def test_geyer_noise_multipliers_and_communication(case):
    asked = {"prob": case["prob"], "rounds": case["rounds"], "eps": 8.0, "delta": case["delta"]}
    assert geyer.noise_multiplier(**asked).value == pytest.approx(case["moments"], abs=1e-3)
    share = round(case["prob"] * case["clients"] * case["rounds"])
    each, rest = divmod(share, case["rounds"])
    clients = [each + 1] * rest + [each] * (case["rounds"] - rest)
    assert geyer.communication_cost(clients).value == pytest.approx(case["cost"], abs=3)


@pytest.mark.soak  # tests/accounting/test_composition.py has the same figures
@pytest.mark.parametrize(("accountant", "which"), [("renyi", 2), ("privacy-loss", 1)])
def test_geyer_noise_multipliers_by_our_accountants(accountant, which):
    case = GOLDEN["geyer"][which]
    asked = {"prob": case["prob"], "rounds": case["rounds"], "eps": 8.0, "delta": case["delta"]}
    assert geyer.noise_multiplier(**asked, accountant=accountant).value == pytest.approx(case[accountant], abs=1e-3)


def test_geyer_moments_accountant_by_quadrature():
    prob, noise, order = 0.3, 1.2, 5
    z = np.linspace(-30, 30, 400_001)
    ratio = (1 - prob) + prob * np.exp((2 * z - 1) / (2 * noise**2))
    base = np.exp(-(z**2) / (2 * noise**2)) / math.sqrt(2 * math.pi * noise**2)
    moment = math.log(np.trapezoid(base * ratio ** (order + 1), z))
    assert geyer.total_log_moments([noisy(prob, noise)])[order - 1] == pytest.approx(moment, rel=1e-9)


def test_geyer_delta_and_eps_answer_each_other():
    eps = geyer.dp_fl([noisy(0.22, 1.3)] * 54, delta=1e-5).eps
    orders = np.arange(1, geyer.MAX_ORDER + 1)
    assert np.exp(np.min(geyer.total_log_moments([noisy(0.22, 1.3)] * 54) - orders * eps)) == pytest.approx(1e-5)
    mixed = [noisy(0.22, 1.3)] * 30 + [noisy(0.3, 2.0)] * 24
    assert geyer.dp_fl(mixed, delta=1e-5).eps == pytest.approx(geyer.dp_fl(mixed[::-1], delta=1e-5).eps)


def test_geyer_verdicts():
    poisson, fixed = [noisy(0.5, 1.0)] * 3, [noisy(0, 1.0, FixedSize(size=50, population=100))] * 3
    assert geyer.dp_fl(poisson, delta=1e-3).verdict is REFUTED
    assert geyer.dp_fl(poisson, delta=1e-3, clip="fixed").verdict is HOLDS
    assert geyer.dp_fl(fixed, delta=1e-3, clip="fixed").verdict is UNPROVEN
    assert geyer.dp_fl(fixed, delta=1e-3).eps == geyer.dp_fl(poisson, delta=1e-3).eps


# --- SubDP ------------------------------------------------------------------------------------------------------------


def test_subdp_recipe_sets_the_noise_that_its_claim_reads_back():
    for group in (1, 2, 3):
        noise = subdp.noise_scale(eps=2.0, delta=1e-5, group=group, prob=0.01, steps=1000).value
        claim = subdp.central_sub([noisy(0.01, noise)] * 1000, delta=1e-5, items_per_subject=group)
        assert claim.eps == pytest.approx(2.0, rel=1e-3)
        assert claim.eps <= 2.0
        eps_item = claim.eps / group  # Thm. 3.2
        delta_item = 1e-5 * math.exp(-(group - 1) * eps_item) / group
        assert geyer.dp_fl([noisy(0.01, noise)] * 1000, delta=delta_item).eps == pytest.approx(eps_item, rel=1e-6)
    assert subdp.local_sub([noisy(0.01, 1.0)], delta=1e-5, items_per_subject=2).verdict is REFUTED


def test_subdp_subjects_that_span_users():
    case = GOLDEN["subdp"]["spans"]
    for users, eps in case["eps_by_users"].items():
        assert gaussian.eps_of(math.sqrt(int(users)), delta=case["delta"]) == pytest.approx(eps, rel=5e-3)
    rounds = [noisy(1.0, 1.0)]
    alone = subdp.central_sub(rounds, delta=1e-5, items_per_subject=1)
    spread = subdp.central_sub(rounds, delta=1e-5, items_per_subject=1, users_per_subject=10)
    assert spread.eps == alone.eps  # "no extra cost"
    assert spread.eps < gaussian.eps_of(math.sqrt(10), delta=1e-5)
    assert spread.reason != alone.reason


# --- Survey -----------------------------------------------------------------------------------------------------------


def test_survey_binary_sum_has_the_wrong_sign():
    bits, users, prob = 300, 1000, 0.4
    expected_reports = (1 - prob) * bits + users * prob / 2
    printed = survey.binary_sum_estimate(reports_sum=expected_reports, num_users=users, prob_random=prob)
    assert printed.value - bits == pytest.approx(users * prob / (1 - prob))
    assert printed.verdict is REFUTED


def test_survey_root_in_the_exponent_is_refuted():
    users, eps_local, delta = 10**6, 14.0, 1e-6
    claim = survey.amplification_multi(eps_local=eps_local, num_users=users, delta=delta)
    assert claim.eps == pytest.approx(1.05, abs=0.01)
    flip = 1 / (1 + math.exp(eps_local))
    counts = binom.pmf(np.arange(60), users - 1, flip)
    shifted = np.concatenate([[0.0], counts[:-1]])
    one, zero = (1 - flip) * shifted + flip * counts, flip * shifted + (1 - flip) * counts
    assert np.maximum(one - math.exp(2) * zero, 0).sum() > delta
    assert claim.verdict is REFUTED
    assert survey.amplification_multi(eps_local=0.5, num_users=users, delta=delta).verdict is HOLDS


def test_survey_rates():
    assert survey.amplification_single(eps_local=0.5, num_users=1000, delta=1e-6).eps == pytest.approx(
        0.5 * math.exp(0.5) * math.sqrt(math.log(1e6) / 1000)
    )
    assert survey.amplification_erlingsson(eps_local=0.2, num_users=10**4, delta=1e-4).eps == pytest.approx(
        0.2 * math.sqrt(math.log(1e4) / 1e4)
    )
    assert survey.error_shuffled_response(eps=0.5, delta=0.01).value == pytest.approx(20)
    assert survey.error_shuffled_response(eps=0.5, delta=0.01).verdict is REFUTED


# --- what keeps claims apart from certificates ------------------------------------------------------------------------

EVENTS = {
    "ss_simple": (simple(), {}),
    "ss_double": (
        PaddedBernoulli(
            report=Report(kind="rr", eps_local=0.5), num_users=USERS, pad_to=333, inclusion=0.02, coordinates=DIM
        ),
        {},
    ),
    "ss_topk": (topk(), {}),
    "apes": (UNIFORM2, {}),
    "unis": (UNIFORM2, {}),
    "s_apes": (UNIFORM2, {"kept": 1570}),
    "pldp": (UNIFORM2, {}),
    "ldp_min": (UNIFORM2, {}),
    "dp_fl": ([noisy(0.5, 1.0)] * 3, {}),
    "central_sub": ([noisy(0.01, 1.0)] * 3, {"items_per_subject": 2}),
    "local_sub": ([noisy(0.01, 1.0)] * 3, {"items_per_subject": 2}),
}


@pytest.mark.parametrize("name", CLAIMED)
def test_every_claim_becomes_a_statement_that_is_not_certified(name):
    event, more = EVENTS[name]
    claim = CLAIMED[name].formula(event, delta=1e-5, **more)
    scope = Scope(trust=Trust.SHUFFLE, adversary="analyzer", neighbors=Neighbors.REPLACE_ONE, unit=Unit.USER)
    statement = claim.statement(scope, span="one round")
    assert (statement.eps, statement.delta, statement.verdict) == (claim.eps, claim.delta, claim.verdict)
    assert claim.reason in str(statement.proof)
    assert claim.verdict.value in str(statement)
    assert claim.reason in str(claim)
    assert Statement.from_json(statement.to_json()) == statement


def test_a_claim_cannot_be_certified_and_has_a_reason():
    good = {"eps": 1.0, "delta": 0.0, "theorem": Theorem(key="k", where="w"), "verdict": HOLDS, "reason": "Because."}
    assert Claim(**good).eps == 1
    bad = (
        {"verdict": Verdict.CERTIFIED},
        {"reason": ""},
        {"reason": "no stop"},
        {"eps": math.nan},
        {"eps": -1.0},
        {"delta": 2.0},
    )
    for change in bad:
        with pytest.raises(ValueError, match="expected"):
            Claim(**(good | change))
    figure = {"value": 1.0, "quantity": "q", "theorem": good["theorem"], "verdict": HOLDS, "reason": "Because."}
    for change in ({"verdict": Verdict.CERTIFIED}, {"reason": ""}, {"value": math.nan}):
        with pytest.raises(ValueError, match="expected"):
            PrintedNumber(**(figure | change))


@pytest.mark.parametrize("module", [flame, apes, geyer, subdp, survey])
def test_public_functions_return_claims_or_figures(module):
    for name in module.__all__:
        returned = inspect.signature(getattr(module, name)).return_annotation
        assert returned in ("Claim", "PrintedNumber", "tuple[PrintedNumber, PrintedNumber]"), name
        assert getattr(module, name).__doc__


def test_no_certifying_module_imports_a_published_formula():
    for path in Path(dovetail.accounting.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                imported = {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                imported = {alias.name for alias in node.names}
            else:
                continue
            assert not any(name.startswith("dovetail.claims") for name in imported), path.name


OUTSIDE = {
    "bennett no gain": lambda: flame.bennett(Report(kind="laplace", eps_local=4.0), num_users=100, delta=1e-9),
    "bennett generic": lambda: flame.bennett(Report(kind="generic", eps_local=1.0), num_users=100, delta=1e-3),
    "closed form": lambda: flame.ss_simple(simple("rr", 2.0), delta=DELTA, evaluation="closed"),
    "double delta": lambda: flame.ss_topk(topk(top=1), delta=0.9),
    "corollary 1": lambda: flame.corollary1(eps_local=9.0, num_users=1000, delta=1e-6),
    "eq 2": lambda: apes.equation2((4.0,) * 1000, delta=1e-8),
    "theorem 4": lambda: apes.theorem4((4.0,) * 1000),
    "few users": lambda: apes.echo_numerical((0.05,) * 150, delta=0.1),
    "laplace rounds": lambda: geyer.dp_fl([noisy(0.5, 0.0)], delta=1e-5),
    "disjoint rounds": lambda: geyer.dp_fl([noisy(0, 1.0, Disjoint(epoch=0))], delta=1e-5),
    "replacement": lambda: geyer.dp_fl(
        [
            Round(
                mechanism=Gaussian(std=1.0, sensitivity=2.0, neighbors=Neighbors.REPLACE_ONE),
                participation=Poisson(prob=0.5),
            )
        ],
        delta=1e-5,
    ),
    "large groups": lambda: subdp.central_sub([noisy(0.5, 1.0)], delta=1e-5, items_per_subject=40),
    "too few orders": lambda: subdp.noise_scale(eps=2.0, delta=1e-5, group=5, prob=0.01, steps=10),
    "only coins": lambda: survey.binary_sum_estimate(reports_sum=1, num_users=2, prob_random=1.0),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_its_hypotheses_a_theorem_does_not_apply(name):
    with pytest.raises(NotApplicable):
        OUTSIDE[name]()


BAD = {
    "nan delta": lambda: flame.ss_simple(simple(), delta=math.nan),
    "delta 1": lambda: flame.ss_topk(topk(), delta=1.0),
    "delta 0": lambda: apes.apes(UNIFORM2, delta=0.0),
    "one user": lambda: flame.bennett(Report(kind="laplace", eps_local=1.0), num_users=1, delta=1e-3),
    "beta index": lambda: flame.theorem5(num_users=10, pad_to=10, beta=1.5),
    "negative eps": lambda: flame.lemma2(eps=-1.0, folds=2),
    "nan eps": lambda: flame.lemma3(eps=math.nan, delta=0.0, folds=2, delta_slack=0.1),
    "sample": lambda: flame.lemma4(eps=1.0, delta=0.0, size=3, population=2),
    "levels": lambda: flame.lemma1(eps_local=1.0, levels=1, num_users=1000, delta=1e-6),
    "evaluation": lambda: flame.ss_simple(simple(), delta=DELTA, evaluation="exact"),
    "linkage": lambda: flame.theorem1(eps_each=0.1, delta_each=1e-6, coordinates=2, linkage="none"),
    "budgets": lambda: apes.theorem4((0.1, -0.1, 0.2)),
    "one budget": lambda: apes.theorem4((0.1,)),
    "nan budget": lambda: apes.equation2((0.1, math.nan), delta=1e-6),
    "kept": lambda: apes.s_apes(UNIFORM2, delta=DELTA_UC, kept=7851),
    "no rounds": lambda: geyer.dp_fl([], delta=1e-5),
    "clip": lambda: geyer.dp_fl([noisy(0.5, 1.0)], delta=1e-5, clip="mean"),
    "accountant": lambda: geyer.noise_multiplier(prob=0.5, rounds=1, eps=8.0, delta=1e-3, accountant="zcdp"),
    "cost": lambda: geyer.communication_cost([3, -1]),
    "sum": lambda: survey.binary_sum_estimate(reports_sum=3, num_users=2, prob_random=0.1),
    "survey delta": lambda: survey.amplification_multi(eps_local=1.0, num_users=100, delta=1.0),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name):
    with pytest.raises(ValueError, match="expected") as error:
        BAD[name]()
    assert not isinstance(error.value, NotApplicable)
