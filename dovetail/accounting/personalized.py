"""Shuffling reports with unequal public budgets: what each user gets from the others (personalised clones).

Another user's report repeats, with probability ``q_i = min(1, 2 c_i E/(E+1))``, a coin that hides the victim's, where
``E = e^(eps_v)`` and ``c_i`` is the infimum of the ratio of user i's density to the victim's. The victim then is one
biased coin, ``D ~ Bern(E/(E+1))``, among ``C ~ PoissonBinomial(q_i, i != v)`` fair ones, and that pair dominates the
shuffled round in both directions (docs/proofs/personalized-clones.md). More clones never hurt, so every approximation
takes fewer: upper tails of C move down, lower tails are charged in full, and users of similar budgets share the bound
of the largest budget among them with the fewest clones of any of them.

Laplace noise of unequal scales has ``c_i = 0`` wherever ``eps_i > eps_v``, because of the far tail alone. There the
victim's outcomes are also cut into a near and a far region of fixed probability, each with clones of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import gammaln

from dovetail import _validate
from dovetail.accounting.clones import CloneCounts, expected_delta, smallest_eps
from dovetail.events import Personalized
from dovetail.statements import Bound, NotApplicable, Theorem

__all__ = [
    "CLONES",
    "CLONES_RENYI",
    "clone_counts",
    "clone_probs",
    "clone_probs_from_pmfs",
    "delta",
    "delta_of",
    "eps",
    "log_pmfs",
    "per_user",
    "renyi",
    "renyi_of",
]

CLONES = Theorem(
    key="dovetail.personalized-clones",
    where="personalised clones (docs/proofs/personalized-clones.md, after Feldman, McMillan, Talwar 2023)",
    url="https://arxiv.org/abs/2208.04591",
)
CLONES_RENYI = Theorem(
    key="dovetail.personalized-clones-renyi",
    where=CLONES.where
    + ", Renyi composition over coordinates, conversion by Canonne, Kamath, Steinke (2020), Prop. 12",
    url="https://arxiv.org/abs/2004.00010",
)

_DOWN, _UP = 1 - 1e-13, 1 + 1e-9
_TINY = 1e-290  # masses below this are charged, not carried
_DEPTH = 300.0  # nats of tail mass that Renyi sums resolve
_NODES = 4096  # privacy losses are rounded to this many nodes where there are many more
_FAR = (1e-9, 1e-3)  # probabilities of the far region that are tried for Laplace noise
_PATIENCE = 200  # groups of users that the search for the worst one may measure
_ORDERS = 1 + np.geomspace(0.02, 1000, 24)

Laws = list[tuple[float, CloneCounts]]  # the number of clones in each region
Pair = tuple[np.ndarray, np.ndarray, float]
Hiding = tuple[tuple[float, np.ndarray], ...]  # (probability of a region of outcomes, clone probabilities in it)


def clone_probs(event: Personalized, victim: int, *, far: float = 0.0) -> Hiding:
    """q_i of the honest others, rounded down, for each region of the victim's outcomes (one region unless far > 0).

    The colluders are taken to be those who would have hidden the most.
    """
    _validate.integer(victim=victim)
    _validate.in_interval(0, len(event.eps_locals) - 1, victim=victim)
    _validate.in_interval(0, 0.5, far=far)
    return _fewest_clones(event, np.array([victim]), far)


def clone_probs_from_pmfs(victim: np.ndarray, others: Sequence[np.ndarray]) -> tuple[float, np.ndarray]:
    """The victim's eps and the q_i from probability tables, one row an input and one column an outcome.

    Guarantees:
        With these, `delta_of` is never below the exact divergence of the shuffled reports, whatever the tables.
    """
    tables = [np.asarray(table, dtype=float) for table in (victim, *others)]
    for table in tables:
        _validate.finite_array(pmf=table)
        if table.ndim != 2 or table.shape[1] != tables[0].shape[1] or (table < 0).any():
            raise ValueError(f"expected tables of probabilities over the same outcomes, got shape {table.shape}")
        if not np.allclose(table.sum(axis=1), 1, atol=1e-9):
            raise ValueError("expected every row of a table to sum to 1")
    possible = tables[0].max(axis=0) > 0
    top, bottom = tables[0].max(axis=0)[possible], tables[0].min(axis=0)[possible]
    if (bottom == 0).any():
        raise NotApplicable("the victim's randomizer has no finite eps: an outcome is impossible for some input only")
    eps_local = float(np.log(top / bottom).max()) * (1 + 1e-13) + 1e-15
    floors = np.array([(table.min(axis=0)[possible] / top).min() for table in tables[1:]])
    return eps_local, np.minimum(1.0, floors * 2 / (1 + math.exp(-eps_local)) * _DOWN)


def _fewest_clones(event: Personalized, victims: np.ndarray, far: float = 0.0) -> Hiding:
    """q_i that no victim of this group falls short of, for the group's largest budget."""
    eps_locals = np.asarray(event.eps_locals)
    low, high = float(eps_locals[victims].min()), float(eps_locals[victims].max())
    small = np.exp(-eps_locals)
    match event.kind:
        case "clip_laplace":
            probs = eps_locals * small / -np.expm1(-eps_locals) * (math.tanh(high / 2) / (high / 2))
        case "laplace":
            probs = eps_locals * small * (2 / (1 + math.exp(-high)) / high)
        case _:
            rest = event.levels - 1
            probs = 2 * small / (1 + rest * small) * ((1 + rest * math.exp(-high)) / (1 + math.exp(-high)))
    regions = [(1.0, probs)]
    if event.kind == "laplace":
        beyond = np.maximum(0.0, eps_locals / low - 1)
        regions = [(far, np.where(beyond > 0, 0.0, probs))] if far else []
        near = far**beyond if far else beyond == 0
        regions.append((1 - far, probs * near))

    def honest(probs: np.ndarray) -> np.ndarray:
        probs = np.minimum(1.0, probs * _DOWN)
        others = np.delete(probs, victims[np.argmax(probs[victims])])
        return np.sort(others)[: len(others) - event.colluders]

    return tuple((mass, honest(mass * probs)) for mass, probs in regions)


def _hidings(event: Personalized, victims: np.ndarray) -> list[Hiding]:
    """Every way to hide these victims that is worth measuring; each alone is a valid bound."""
    plain = _fewest_clones(event, victims)
    found = [plain]
    for far in _FAR if event.kind == "laplace" else ():
        hiding = _fewest_clones(event, victims, far)
        if hiding[-1][1].sum() > 1.5 * plain[0][1].sum():
            found.append(hiding)
    return found


def clone_counts(probs: np.ndarray) -> CloneCounts:
    """C ~ PoissonBinomial(probs), by direct convolution of positive numbers: no transform, no cancellation.

    Guarantees:
        With the mass below put at no clones, the law is stochastically at most the exact one.
    """
    probs = np.asarray(probs, dtype=float)
    _validate.finite_array(probs=probs)
    if ((probs < 0) | (probs > 1)).any():
        raise ValueError(f"expected probabilities, got values from {probs.min()} to {probs.max()}")
    rows = np.stack([1 - probs, probs], axis=1) if len(probs) else np.ones((1, 1))
    while len(rows) > 1 and rows.shape[1] <= 64:
        if len(rows) % 2:
            rows = np.concatenate([rows, np.eye(1, rows.shape[1])])
        a, b = rows[::2], rows[1::2]
        rows = np.zeros((len(a), 2 * a.shape[1] - 1))
        for j in range(a.shape[1]):
            rows[:, j : j + a.shape[1]] += a[:, j : j + 1] * b
    parts = [_trim(row, 0, 0.0, _TINY) for row in rows]
    while len(parts) > 1:
        odd = parts[len(parts) - len(parts) % 2 :]
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [_trim(np.convolve(a, b), i + j, lost + more, _TINY) for (a, i, lost), (b, j, more) in pairs] + odd
    weights, first, below = parts[0]
    outward = 1 + 1e-15 * (len(probs) + 64)
    return CloneCounts(counts=first + np.arange(len(weights)), weights=weights * outward, below=below, above=0.0)


def _trim(masses: np.ndarray, first: int, lost: float, least: float) -> tuple[np.ndarray, int, float]:
    """Drop negligible ends: below, the mass is charged; above, it moves down to the last count kept."""
    keep = np.flatnonzero(masses > least)
    i, j = int(keep[0]), int(keep[-1]) + 1
    kept = masses[i:j].copy()
    kept[-1] += masses[j:].sum()
    return kept, first + i, lost + float(masses[:i].sum()) + len(masses) * _TINY


def _core(law: CloneCounts, least: float) -> CloneCounts:
    """The law without ends whose counts weigh less than this each."""
    weights, first, below = _trim(law.weights, int(law.counts[0]), law.below, least)
    return CloneCounts(counts=first + np.arange(len(weights)), weights=weights, below=below, above=0.0)


def delta_of(probs: np.ndarray, *, eps_local: float, eps: float) -> float:
    """delta at eps of one coin of bias eps_local among a PoissonBinomial(probs) number of fair ones, rounded up."""
    _validate.positive(eps_local=eps_local)
    _validate.non_negative(eps=eps)
    return _delta(_laws(((1.0, probs),)), eps_local, eps)


def _delta(laws: Laws, eps_local: float, eps: float) -> float:
    terms = (mass * expected_delta(_core(law, 1e-60), eps=eps, eps_local=eps_local) for mass, law in laws)
    return min(1.0, math.fsum(terms) * (1 + 1e-14))


def renyi_of(probs: np.ndarray, orders: np.ndarray, *, eps_local: float) -> np.ndarray:
    """Renyi divergence, at each order, of the pair of `delta_of` (equal in both directions), rounded up."""
    _validate.positive(eps_local=eps_local)
    return _renyi(_pair(_laws(((1.0, probs),)), eps_local), eps_local, orders)


def _renyi(pair: Pair, eps_local: float, orders: np.ndarray) -> np.ndarray:
    """log(1 + E_Q[r^a - 1 - a (r - 1)]) / (a - 1), r = P/Q: no term is negative, so nothing cancels in the sum."""
    loss, log_q, tail = pair
    result = np.full(len(orders), np.inf)
    for index, order in enumerate(np.asarray(orders, dtype=float)):
        if math.isfinite(order) and order > 1:
            log_terms = log_q + _log_terms(loss, order)
            peak = log_terms.max()
            log_sum = peak + math.log(np.exp(log_terms - peak).sum()) if np.isfinite(peak) else peak
            log_tail = math.log(max(tail, _TINY)) + max(order * eps_local, math.log(order))
            result[index] = np.logaddexp(0.0, np.logaddexp(log_sum, log_tail) + 1e-9) / (order - 1)
    return result


def _log_terms(loss: np.ndarray, order: float) -> np.ndarray:
    """log(r^a - 1 - a (r - 1)) at r = e^loss: by its series near 0, shifted where it would overflow."""
    a, x = order, np.clip(order * loss, -np.inf, 30.0)
    near = np.abs(x) < 1e-2
    y = np.where(near, loss, 0.0)
    series = (
        (a - 1)
        * a
        / 2
        * y
        * y
        * (1 + (a + 1) / 3 * y + (a * a + a + 1) / 12 * y * y + (a**3 + a * a + a + 1) / 60 * y**3)
    )
    excess = np.expm1(loss)
    far = order * loss > 30.0
    plain = np.where(near, series, np.expm1(x) - a * np.where(far, 0.0, excess))
    with np.errstate(divide="ignore"):
        shifted = order * loss + np.log1p(np.where(far, -(1 + a * excess) * np.exp(-order * np.abs(loss)), 0.0))
        return np.where(far, shifted, np.log(np.maximum(plain, 0.0)))


def _pair(laws: Laws, eps_local: float) -> Pair:
    """The dominating pair as privacy losses log(P/Q), their log-masses under Q, and the mass left out.

    Losses share nodes when there are many: each is split between its two neighbours so that neither P nor Q gains or
    loses mass, a mean-preserving spread of P/Q, which can only raise a divergence.
    """
    losses, weights, tail = [], [], 0.0
    for region, law in laws:
        counts, masses, lost = _coarser(law)
        tail += region * lost
        for c, mass in zip(counts, region * masses, strict=True):
            loss, chance, missed = _step(int(c), eps_local, depth=_DEPTH + math.log(mass))
            losses.append(loss)
            weights.append(mass * chance)
            tail += mass * missed
    loss, weight = np.concatenate(losses), np.concatenate(weights)
    if len(loss) > 4 * _NODES:
        loss, weight = _onto_nodes(loss, weight)
    keep = weight > 0
    return loss[keep], np.log(weight[keep]), tail


def _step(c: int, eps_local: float, *, depth: float) -> tuple[np.ndarray, np.ndarray, float]:
    """Losses and probabilities under Q of a ones among c + 1 coins, but for ends of mass e^-depth (Hoeffding)."""
    reach = math.sqrt(max(c, 1) / 2 * max(depth, 1.0))
    middle = (c + 1) / 2
    a = np.arange(max(0, math.floor(middle - reach - 1)), min(c + 1, math.ceil(middle + reach + 1)) + 1)
    missed = 2 * math.exp(-2 * reach**2 / max(c, 1)) if len(a) < c + 2 else 0.0
    ones, zeros, small = a / (c + 1), (c + 1 - a) / (c + 1), math.exp(-eps_local)
    likely = small * ones + zeros
    loss = np.log1p(-math.expm1(-eps_local) * (ones - zeros) / likely)
    log_binomial = -gammaln(a + 1) - gammaln(c + 2 - a)
    chance = np.exp(log_binomial - log_binomial.max()) * likely
    return loss, chance / chance.sum(), missed


def _onto_nodes(loss: np.ndarray, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    nodes, width = np.linspace(loss.min(), loss.max(), _NODES, retstep=True)
    below = np.clip(((loss - nodes[0]) / width).astype(int), 0, _NODES - 2)
    upper = np.clip(np.expm1(loss - nodes[below]) / math.expm1(width), 0.0, 1.0) * weight
    return nodes, np.bincount(below, weight - upper, _NODES) + np.bincount(below + 1, upper, _NODES)


def _coarser(law: CloneCounts) -> tuple[np.ndarray, np.ndarray, float]:
    """Counts rounded down, to an eighth of their deviation in the bulk and a whole one beyond; never up."""
    law = _core(law, math.exp(-_DEPTH))
    counts, masses = law.counts, law.weights
    mean = float(counts @ masses) / masses.sum()
    deviation = math.sqrt(float((counts - mean) ** 2 @ masses))
    if deviation < 16:
        return counts, masses, law.below
    fine, coarse = int(deviation / 8), int(deviation)
    start = np.where(abs(counts - mean) < 8 * deviation, counts // fine * fine, counts // coarse * coarse)
    values, where = np.unique(np.maximum(start, counts[0]), return_inverse=True)
    return values, np.bincount(where, masses), law.below


def delta(event: Personalized, *, eps: float, victim: int | None = None) -> float:
    """delta at eps for one coordinate: of this victim, or (None) of every user."""
    _validate.non_negative(eps=eps)
    return float(_worst(event, lambda hiding, top: np.array([_delta(_laws(hiding), top, eps)]), victim)[0])


def renyi(event: Personalized, orders: np.ndarray, victim: int | None = None) -> np.ndarray:
    """Renyi divergence of all coordinates together: of this victim, or (None) of every user, order by order."""
    one = _worst(event, lambda hiding, top: _renyi(_pair(_laws(hiding), top), top, orders), victim)
    return event.coordinates * one


def log_pmfs(event: Personalized, victim: int | None = None) -> tuple[np.ndarray, np.ndarray, float]:
    """One coordinate's dominating pair: log P, log Q, and mass to add to delta. None: one pair for all users."""
    if victim is None and event.kind == "laplace" and len(set(event.eps_locals)) > 1:
        raise NotApplicable("no one pair dominates all users of Laplace noise with unequal budgets; ask for a victim")
    victims = np.arange(len(event.eps_locals)) if victim is None else np.array([victim])
    top = max(event.eps_locals[v] for v in victims)
    pairs = [_pair(_laws(hiding), top) for hiding in _hidings(event, victims)]
    loss, log_q, tail = min(pairs, key=lambda pair: float(_renyi(pair, top, np.array([8.0]))[0]))
    log_q = log_q - math.log(np.exp(log_q).sum())
    return log_q + loss, log_q, tail


def eps(event: Personalized, *, delta: float, victim: int | None = None) -> Bound:
    """eps at delta over all coordinates: of this victim, or (None) the maximum over users.

    Guarantees:
        Never below the exact value (brute force at small n), and never above the local guarantee.
        The maximum is at least every user's own bound.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    value = _worst(event, lambda hiding, top: np.array([_eps(event, hiding, top, delta)]), victim)[0]
    return _bound(event, float(value), delta)


def per_user(event: Personalized, *, delta: float, tolerance: float = 0.01) -> tuple[Bound, ...]:
    """eps at delta over all coordinates for every user; budgets within `tolerance` of each other share a bound.

    Guarantees:
        No user's eps is below `eps(event, delta=delta, victim=user)`; equal when no bound is shared.
    """
    _validate.in_open_interval(0, 1, delta=delta)
    _validate.in_interval(0, 1, tolerance=tolerance)
    eps_locals = np.asarray(event.eps_locals)
    order = np.argsort(eps_locals, kind="stable")
    sorted_eps = eps_locals[order]
    answers: dict[int, Bound] = {}
    start = 0
    while start < len(order):
        stop = int(np.searchsorted(sorted_eps, sorted_eps[start] * (1 + tolerance), side="right"))
        members = order[start:stop]
        value = min(_eps(event, hiding, float(sorted_eps[stop - 1]), delta) for hiding in _hidings(event, members))
        answers.update(dict.fromkeys(members.tolist(), _bound(event, value, delta)))
        start = stop
    return tuple(answers[user] for user in range(len(order)))


def _laws(hiding: Hiding) -> Laws:
    return [(mass, clone_counts(probs)) for mass, probs in hiding]


def _eps(event: Personalized, hiding: Hiding, eps_local: float, delta: float) -> float:
    laws = _laws(hiding)
    if event.coordinates == 1:
        return smallest_eps(lambda eps: _delta(laws, eps_local, eps), delta=delta, high=eps_local)
    pair = _pair(laws, eps_local)

    def converted(orders: np.ndarray) -> np.ndarray:
        total = event.coordinates * _renyi(pair, eps_local, orders)
        return total + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)

    best = int(np.argmin(converted(_ORDERS)))
    closer = 1 + np.geomspace(_ORDERS[max(best - 1, 0)] - 1, _ORDERS[min(best + 1, len(_ORDERS) - 1)] - 1, 48)
    return min(event.coordinates * eps_local, max(0.0, float(converted(closer).min()) * _UP))


def _bound(event: Personalized, value: float, delta: float) -> Bound:
    return Bound(eps=value, delta=delta, theorem=CLONES if event.coordinates == 1 else CLONES_RENYI)


def _worst(event: Personalized, measure: Callable[[Hiding, float], np.ndarray], victim: int | None) -> np.ndarray:
    """The measure of one victim, or an upper bound on everybody's: groups are halved while theirs says too little."""
    eps_locals = np.asarray(event.eps_locals)

    def of(members: np.ndarray) -> np.ndarray:
        top = float(eps_locals[members].max())
        return np.min([measure(hiding, top) for hiding in _hidings(event, members)], axis=0)

    if victim is not None:
        _validate.in_interval(0, len(eps_locals) - 1, victim=victim)
        return of(np.array([victim]))
    order = np.argsort(eps_locals, kind="stable")
    best = worst = of(order[-1:])
    groups, measured = [order[:-1]], 0
    while groups:
        members = groups.pop()
        bound, measured = of(members), measured + 1
        if len(members) == 1 or measured >= _PATIENCE or (bound <= best * (1 + 1e-3)).all():
            worst = np.maximum(worst, bound)
            best = np.maximum(best, bound) if len(members) == 1 else best
        else:
            middle = len(members) // 2
            groups += [members[:middle], members[middle:]]
    return worst
