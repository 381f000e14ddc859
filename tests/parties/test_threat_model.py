"""What docs/threat-model.md says of the dishonest, in numbers, and that each of its promises has a test."""

from __future__ import annotations

import ast
import functools
import math
import re
import secrets
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from parties.household import Household

import dovetail
from dovetail import protocols
from dovetail.events import Everyone
from dovetail.guarantee import Guarantee, Spread
from dovetail.mechanisms import seeds
from dovetail.numbers import at_most
from dovetail.parties.common.guarantees import certify_task
from dovetail.parties.common.sealing import open_sealed, seal
from dovetail.parties.common.wire import Closed, Packed, decode_vector
from dovetail.protocols import Cohort

ROOT = Path(__file__).parents[2]
PAGE, CODE = ROOT / "docs" / "threat-model.md", Path(dovetail.__file__).parent
USERS, DIM, CLIP = 50, 650, 0.25


def section(title):
    """The text under a heading of the page that begins like this."""
    return re.split(r"^## ", PAGE.read_text().split(f"\n## {title}")[1], flags=re.M)[0]


def built(name, *, dim=DIM, **settings):
    """A protocol as a task would settle it."""
    cohort = Cohort(participation=Everyone(), size=USERS, min_size=USERS)
    return protocols.build(name, settings).settle(cohort, dim)


def added(protocol, slots, values, *, dim=DIM):
    """What messages of one user that the analyzer does not refuse add to the sum of all updates."""
    messages = protocol.messages(dim)

    def total(slot, body):
        shuffled, refused = messages.read(slot, body)
        assert refused == 0
        tally, state = protocol.tally(shuffled, dim), protocol.init(dim)
        return USERS * np.asarray(protocol.estimate(tally, USERS, state, key=jax.random.key(0))[0], np.float64)

    body = np.ascontiguousarray(values, "<u8").view(np.uint8).reshape(len(slots), 8)[:, : messages.size]
    nobody = np.zeros(0, np.int64), np.zeros((0, messages.size), np.uint8)
    assert len(slots) == messages.per_client  # or the shuffler does not take them
    return total(np.asarray(slots, np.int64), np.ascontiguousarray(body)) - total(*nobody)


def slope(eps_local, levels=2):
    """s: how much of a coordinate a report tells on average."""
    return math.expm1(eps_local) / (math.exp(eps_local) + levels - 1)


@pytest.mark.parametrize("levels", [2, 5])
@pytest.mark.parametrize("eps_local", [0.5, 4.0])
def test_of_a_coordinate_a_lie_adds_the_clip_value_over_the_slope(eps_local, levels):
    more = {} if levels == 2 else {"randomizer": "rr", "levels": levels}
    protocol = built("ss_simple", clip_value=CLIP, eps_local=eps_local, **more)
    for level, sign in ((0, -1), (levels - 1, 1)):
        found = added(protocol, range(DIM), np.full(DIM, level))
        np.testing.assert_allclose(found, sign * CLIP / slope(eps_local, levels), rtol=1e-4)
    assert slope(eps_local) == pytest.approx(math.tanh(eps_local / 2))


def test_a_lie_about_every_coordinate_counts_where_the_k_largest_should():
    protocol = built("ss_topk", clip_value=CLIP, eps_local=0.5, k=65)
    found = added(protocol, range(DIM), np.ones(DIM))
    np.testing.assert_allclose(found, CLIP / slope(0.5), rtol=1e-4)
    factor = np.abs(found).sum() / (65 * CLIP)  # an honest user adds k coordinates on average
    assert factor == pytest.approx(DIM / 65 / math.tanh(0.25), rel=1e-4)
    assert f"{factor:.1f}" == "40.8"


def test_a_lie_about_chosen_coordinates_counts_as_if_they_had_been_drawn():
    protocol = built("ss_double", clip_value=CLIP, eps_local=0.5, beta=0.02, inclusion="fixed-k")
    found = added(protocol, range(13), np.ones(13))
    np.testing.assert_allclose(found[:13], DIM / 13 * CLIP / slope(0.5), rtol=1e-4)
    np.testing.assert_allclose(found[13:], 0, atol=1e-4)
    assert np.abs(found).sum() == pytest.approx(DIM * CLIP / slope(0.5), rel=1e-4)


@pytest.mark.parametrize(("dim", "eps_local", "factor"), [(650, 2.0, "32.4"), (650, 8.0, "9.3"), (7850, 2.0, "112.7")])
def test_any_seed_is_a_direction_of_the_clip_norm_over_the_mean_projection(dim, eps_local, factor):
    """All as long, honest or not; an honest one points the right way only on average."""
    protocol = built("privunit", dim=dim, clip_norm=CLIP, eps_local=eps_local)
    mean = protocol.local_randomizer(dim).slope * CLIP
    for seed in (bytes(16), b"\xff" * 16, secrets.token_bytes(16)):
        messages = protocol.messages(dim)
        shuffled, refused = messages.read(np.zeros(1, np.int64), np.frombuffer(seed, np.uint8)[None])
        found, _ = protocol.estimate(protocol.tally(shuffled, dim), USERS, protocol.init(dim), key=jax.random.key(0))
        assert refused == 0
        assert USERS * np.linalg.norm(found) == pytest.approx(CLIP / mean, rel=1e-4)
    assert f"{1 / mean:.1f}" == factor
    assert 1 / mean == pytest.approx({2.0: 1.27, 8.0: 0.365}[eps_local] * math.sqrt(dim), rel=0.005)


def test_a_seed_has_to_be_searched_for_so_its_direction_is_not_chosen_freely():
    """Of N seeds the best has a projection of about sqrt(2 ln N / d) on a direction that one has in mind."""
    count, target = 4096, np.eye(DIM)[0]
    drawn = seeds.directions_of_seeds(np.random.default_rng(0).integers(0, 256, (count, 16), np.uint8), DIM)
    best, bound = float((drawn @ target).max()), math.sqrt(2 * math.log(count) / DIM)
    assert 0.7 * bound < best < 1.1 * bound


@pytest.mark.parametrize(
    ("name", "settings", "levels"),
    [
        ("binary_sum", {"eps_local": 0.5}, 2),
        ("real_sum", {"eps_local": 0.5, "method": "single", "levels": 7}, 7),
    ],
)
def test_a_lie_about_a_number_spans_the_unit_interval_over_the_slope(name, settings, levels):
    protocol = built(name, dim=1, **settings)
    low, high = (added(protocol, [0], [level], dim=1)[0] for level in (0, levels - 1))
    assert high - low == pytest.approx(1 / slope(0.5, levels), rel=1e-4)
    assert low < 0 and high > 1


def test_shares_of_any_number_are_taken():
    """Whatever adds up: half of the modulus over the scale, on every coordinate, of which nothing is refused."""
    protocol = built("split_and_mix", dim=4, clip_norm=CLIP, noise_multiplier=1.0, mixing_error=1e-4)
    most = protocol.modulus // 2 - 1
    shares = np.zeros((4, protocol.shares), np.int64)
    shares[:, 0] = most
    found = added(protocol, range(4 * protocol.shares), shares.ravel(), dim=4)
    np.testing.assert_allclose(found, most / protocol.scale, rtol=1e-5)
    assert np.linalg.norm(found) > 10 * CLIP  # what an honest one adds, but for its noise


def test_a_dishonest_shuffler_alone_learns_a_report_and_the_local_guarantee_is_what_remains(tmp_path):
    """It puts messages of its own in everybody else's place, and takes them off the public model again."""
    household = Household(tmp_path, "privunit", dim=20, clients=8)
    task, analyzer = household.task, household.analyzer()
    victim = household.content(3, household.envelope(3, update=np.ones(20)).uploads[0])
    known = [secrets.token_bytes(16) for _ in range(7)]
    own = [(0, seal(one, task.analyzer.sealing_key(), task.message_purpose(1))) for one in known]
    analyzer.count_part(0, 1, bytes(16), 0, Packed.of([*own, (0, victim[4:])]).encode())
    analyzer.note_closed(0, 1, Closed(state="sent", parts=1, uploads=8, batch=bytes(16)))
    moved = decode_vector(analyzer.model(1), 20)  # the first model was zero
    promised, without_trust = (analyzer.privacy()[name] for name in ("statement", "without_trust"))
    analyzer.close()
    law = task.build()[0].local_randomizer(20)
    theirs = seeds.directions_of_seeds(np.frombuffer(b"".join(known), np.uint8).reshape(7, 16), 20)
    found = 8 * moved * law.slope - theirs.sum(axis=0)
    seed = open_sealed(victim[4:], household.ring.current().opening_key(), task.message_purpose(1))
    report = seeds.directions_of_seeds(np.frombuffer(seed, np.uint8)[None], 20)[0]
    np.testing.assert_allclose(found, report, atol=1e-5)  # the report, as if it had been sent by name
    assert without_trust["eps"] == pytest.approx(household.task.settings["eps_local"], rel=1e-6)
    assert without_trust["adversary"] == "shuffler and analyzer, and everyone else"
    assert promised["adversary"] == "analyzer"  # what it says of a crowd is not said of the shuffler, who chose it
    assert any("every round has at least 8 honest users" in one for one in promised["assumptions"])


@pytest.mark.parametrize(
    ("protocol", "settings", "eps"),
    [("privunit", {"eps_local": 2.0}, 2.0), ("ss_topk", {"eps_local": 0.5, "k": 3}, 1.5), ("split_and_mix", {}, None)],
    ids=["privunit", "ss_topk", "split_and_mix"],
)
def test_analyzer_and_shufflers_together_face_the_local_guarantee(tmp_path, protocol, settings, eps):
    """eps_local per report of PrivUnit, k eps_local of the k largest, nothing of shares."""
    task = Household(tmp_path, protocol).task
    _, local = certify_task(msgspec.structs.replace(task, settings={**task.settings, **settings}), 1)
    assert local.is_unbounded if eps is None else local.eps == pytest.approx(eps, rel=1e-6)


@pytest.mark.parametrize("protocol", ["ss_topk", "privunit", "split_and_mix"])
def test_statements_say_that_nobody_may_time_a_client(tmp_path, protocol):
    certified, local = certify_task(Household(tmp_path, protocol).task, 1)
    for statement in (certified, local):
        assert "nobody learns how long a client takes to draw its messages" in statement.assumptions


FAKE = {"privunit": {"eps_local": 2.0, "clip_norm": CLIP}, "ss_topk": {"eps_local": 0.5, "clip_value": CLIP, "k": 65}}


@pytest.mark.parametrize("protocol", FAKE)
def test_the_page_states_eps_with_fake_users(protocol):
    rows = [row.strip("| ").split(" | ") for row in section("Fake users").splitlines() if re.match(r"\| \d", row)]
    assert [fake for fake, *_ in rows] == ["0", "100", "500", "900", "990"]
    for fake, *stated in rows:
        cohort = Cohort(participation=Everyone(), size=1000, min_size=1000, colluders=int(fake))
        settled = protocols.build(protocol, FAKE[protocol]).settle(cohort, DIM)
        terms = {"relation": settled.relation, "delta": 1e-6, "spread": Spread(users=1000)}
        guarantee = Guarantee(protocol=settled, cohorts=(cohort,), dim=DIM, **terms)
        eps = guarantee.record().certified_statement().eps
        assert float(at_most(eps, 3)) == float(stated[list(FAKE).index(protocol)]), fake


def test_no_code_of_users_knows_how_to_speak_to_an_analyzer():
    """Only `AnalyzerClient` does; users speak to shufflers and aggregators, whose answers the analyzer signed."""
    files = [CODE / "cli" / "users.py", *(CODE / "parties" / "user").glob("*.py")]
    found = {path.relative_to(CODE).as_posix(): path.read_text() for path in files}
    assert {"cli/users.py", "parties/user/participation.py", "parties/user/client.py"} <= set(found)
    assert [name for name, text in found.items() if "AnalyzerClient" in text] == []


def test_the_page_states_these_bounds():
    text = " ".join(PAGE.read_text().split())
    for said in ("clip_norm / m", "clip_value / s", "(d / k) / s", "modulus / (2 scale)", "tanh(eps_local / 2)"):
        assert said in text, said
    for number in ("32.4", "40.8", "4.08"):
        assert number in text, number
    assert "at most one clipped update" not in text


# --- the table of promises

OTHERS = {"soak": "make soak", "flower": "make flower", "torch": "make flower", "browser": "make browser"}
OTHERS["postgres"] = "make postgres"  # marks of tests that `make test` leaves out, and who runs them


@functools.cache
def marked_tests(path):
    """Every test of a file with its marks, by the file's syntax: nothing is imported."""
    tree = ast.parse((ROOT / path).read_text() if (ROOT / path).is_file() else "")
    whole = {mark for node in tree.body if _names(node) == ["pytestmark"] for mark in _marks(node.value)}
    nodes = [*tree.body, *(inner for node in tree.body if isinstance(node, ast.ClassDef) for inner in node.body)]
    return {
        node.name: whole.union(*(_marks(one) for one in node.decorator_list if not _is_parametrized(one)))
        for node in nodes
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    }


def _names(node):
    return [ast.unparse(one) for one in node.targets] if isinstance(node, ast.Assign) else []


def _is_parametrized(node):
    """Marks within are those of single cases, and others remain."""
    return "parametrize" in ast.unparse(getattr(node, "func", node))


def _marks(node):
    return set(re.findall(r"pytest\.mark\.(\w+)", ast.unparse(node)))


def wrong_with(promise, tests):
    """What is missing in a row of the table."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    if not promise or not named or len(named) != tests.count("`") // 2:
        return f"{promise!r} names no test, or something else: {tests!r}"
    absent = [f"{path}::{name}" for path, name in named if name not in marked_tests(path)]
    if absent:
        return f"{promise!r} names tests that do not exist: {absent}"
    left_out = [[OTHERS[mark] for mark in marked_tests(path)[name] if mark in OTHERS] for path, name in named]
    said = set(re.findall(r"\((make \w+)\)", tests))
    runs = {one for some in left_out for one in some}
    if said - runs or (all(left_out) and said != runs):
        return (
            f"{promise!r}: `make test` leaves these tests out, or does not: expected {sorted(runs)}, got {sorted(said)}"
        )
    return None


def test_every_promise_names_tests_that_exist_and_run():
    lines = [line for line in section("Promises and their tests").splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines if line != "| promise | test |"]
    assert all(len(row) == 2 for row in rows), [row for row in rows if len(row) != 2]
    assert [wrong for row in rows if (wrong := wrong_with(*row))] == []
    assert len({promise for promise, _ in rows}) == len(rows) > 40


@pytest.mark.parametrize(
    ("tests", "wrong"),
    [
        ("`tests/parties/test_store.py::test_below_the_minimum_nothing_ever_leaves`", None),
        ("`tests/parties/test_store.py::test_that_nobody_wrote`", "do not exist"),
        ("`tests/parties/test_nothing.py::test_below_the_minimum_nothing_ever_leaves`", "do not exist"),
        ("", "names no test"),
        ("`tests/parties/test_store.py`", "or something else"),
        ("`tests/parties/test_flower.py::test_nobody_else_imports_flwr`", "leaves these tests out"),
        ("`tests/parties/test_flower.py::test_nobody_else_imports_flwr` (make flower)", None),
        ("`tests/parties/test_flower.py::test_nobody_else_imports_flwr` (make soak)", "leaves these tests out"),
        ("`tests/parties/test_exactly_once.py::test_a_hundred_kills`", "leaves these tests out"),
        ("`tests/parties/test_store.py::test_many_at_once_and_many_times_count_once` (make flower)", "or does not"),
    ],
)
def test_a_row_without_a_test_that_runs_is_found(tests, wrong):
    found = wrong_with("something", tests)
    assert found is None if wrong is None else wrong in found
