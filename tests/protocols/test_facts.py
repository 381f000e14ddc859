"""What is known of every protocol is a fact of its class: no table elsewhere is keyed by its name."""

import ast
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grids import diagonal

import dovetail
from dovetail import protocols, references
from dovetail.audit import attack_terms
from dovetail.events import Everyone
from dovetail.guarantee import quotes
from dovetail.protocols import PROTOCOLS, Claimed, Cohort, Fast, Protocol, fast_path
from dovetail.protocols.curator.fedavg import FedAvg
from dovetail.protocols.flame.ss_simple import SsSimple
from dovetail.protocols.flame.ss_topk import SsTopk
from dovetail.statements import Verdict

SOURCE = Path(dovetail.__file__).parent
USERS = 50
# settings of one experiment, or of one paper, by the protocols that it runs
OWN_CHOICES = ("audit/cases.py", "papers/", "parties/demo.py")


@pytest.mark.parametrize(("name", "size"), diagonal(list(PROTOCOLS), [4, 200]))
def test_the_example_settings_build_settle_and_are_quoted(name, size):
    cls = PROTOCOLS[name]
    dim = cls.only_dim or size
    settings = cls.example(dim, {})
    assert protocols.fill_settings(name, dim, {}) == settings
    assert set(settings) <= {field.name for field in dataclasses.fields(cls)}
    protocol = protocols.build(name, settings)
    assert protocol.is_calibrated
    protocol.settle(Cohort(participation=Everyone(), size=USERS, min_size=USERS), dim)
    terms = attack_terms(name, USERS, dim, 1e-4, chosen={})
    assert terms.settings == settings
    quote = quotes.quote(name, terms)
    assert (quote.certified.eps > 0) or cls is FedAvg
    assert quote.claimed is None or (issubclass(cls, Claimed) and quote.claimed.verdict is not Verdict.CERTIFIED)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_facts_are_filled_in(name):
    cls = PROTOCOLS[name]
    assert cls.name == name
    assert cls.references
    assert all(references.find_entry(key) for key in cls.references)
    assert not issubclass(cls, Claimed) or callable(cls.formula)


@pytest.mark.parametrize(
    ("name", "chosen", "filled"),
    [
        ("ldp_fl", {"randomizer": "laplace", "eps_local": 1.0}, {"randomizer": "laplace", "eps_local": 1.0}),
        ("real_sum", {"method": "split"}, {"method": "split"}),
        ("real_sum", {"method": "unary"}, {"method": "unary", "eps_local": 1.0}),
        ("ss_topk", {"k": 3}, {"k": 3, "eps_local": 0.5}),
    ],
)
def test_what_was_chosen_leaves_room_for_the_rest_of_the_example_or_none(name, chosen, filled):
    assert protocols.fill_settings(name, 10, chosen) == filled


def keyed_by_protocol(node: ast.AST) -> bool:
    if isinstance(node, ast.Dict):
        keys = node.keys
    elif isinstance(node, ast.Compare):
        keys = [node.left, *node.comparators]
        keys += [part for key in keys if isinstance(key, ast.Tuple | ast.Set | ast.List) for part in key.elts]
    elif isinstance(node, ast.MatchValue):
        keys = [node.value]
    else:
        return False
    bundled = set(PROTOCOLS) - {"fedavg"}  # also a way to train
    return any(isinstance(key, ast.Constant) and key.value in bundled for key in keys)


@pytest.mark.parametrize("file", sorted(SOURCE.rglob("*.py")), ids=lambda file: str(file.relative_to(SOURCE)))
def test_no_table_and_no_question_is_keyed_by_a_protocols_name(file):
    where = str(file.relative_to(SOURCE))
    if where.startswith(OWN_CHOICES) or where == "mechanisms/__init__.py":  # randomizers, one of which has this name
        return
    found = [node.lineno for node in ast.walk(ast.parse(file.read_text())) if keyed_by_protocol(node)]
    assert not found, f"lines {found}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slow(Protocol):
    """A protocol that has its messages alone."""

    name: ClassVar[str] = "slow"
    inner: Protocol = dataclasses.field(default_factory=FedAvg)

    def layout(self, dim: int) -> Any:
        return self.inner.layout(dim)

    def randomize(self, x: jax.Array, state: Any, *, key: jax.Array, budget: jax.Array | None = None) -> Any:
        return self.inner.randomize(x, state, key=key)

    def tally(self, reports: Any, dim: int) -> Any:
        return self.inner.tally(reports, dim)

    def estimate(self, tally: Any, size: int, state: Any, *, key: jax.Array) -> Any:
        return self.inner.estimate(tally, size, state, key=key)

    def view(self, cohort: Any, dim: int, *, neighbors: Any) -> Any:
        return self.inner.view(cohort, dim, neighbors=neighbors)

    def noise_std(self, size: int, dim: int) -> float:
        return 0.0


def test_a_protocol_without_a_fast_path_is_summed_by_its_messages():
    xs, keys = jnp.arange(12.0).reshape(4, 3), jax.random.split(jax.random.key(0), 4)
    path = fast_path(Slow(), 3)
    assert not isinstance(Slow(), Fast)
    assert path.is_summable
    assert path.scaling(jnp.ones(1), ()) is None
    collected = path.collect(xs, jnp.array([True, True, False, True]), (), keys=keys)
    np.testing.assert_allclose(path.finish(collected, key=keys[0]), xs[0] + xs[1] + xs[3])
    assert fast_path(FedAvg(), 3) == FedAvg()


def test_sums_do_not_serve_where_a_shuffler_pads_and_no_fast_path_says_how():
    cohort = Cohort(participation=Everyone(), size=USERS, min_size=USERS)
    padded = SsTopk(eps_local=0.5, k=2).settle(cohort, 10)
    assert fast_path(padded, 10).is_summable
    assert not fast_path(Slow(inner=padded), 10).is_summable


def test_what_flame_says_of_indices_stands_beside_what_the_shuffler_learns():
    def shuffler(**settings):
        terms = quotes.Terms(num_users=1000, dim=7850, delta=1e-5, settings={"eps_local": 0.5, "k": 157, **settings})
        return quotes.quote("ss_topk", terms).shuffler

    told = shuffler(decoys=157, pad_to=333)
    assert told.is_unbounded
    assert "the shuffler sees which coordinates a client reports; FLAME Thm. 5 allows" in str(told.proof)
    assert "FLAME" not in str(shuffler().proof)


def test_a_claim_is_none_where_its_formula_gives_no_number():
    class Overflows(SsSimple):
        """A formula beyond what a computer holds."""

        @staticmethod
        def formula(about, *, delta, **more):
            return 1 / 0

    cohort = Cohort(participation=Everyone(), size=USERS, min_size=USERS)
    assert SsSimple(eps_local=0.1).claim([cohort], 3, delta=1e-5) is not None
    assert Overflows(eps_local=0.1).claim([cohort], 3, delta=1e-5) is None
    assert SsSimple(eps_local=0.1).claim([], 3, delta=1e-5) is None


def test_a_first_try_of_ldp_fl_has_noise_as_long_as_the_clip_norm():
    protocol = protocols.build("ldp_fl", protocols.find("ldp_fl").example(20, {}))
    assert protocol.local_randomizer.std == protocol.local_randomizer.clip_norm == protocol.clip_norm
