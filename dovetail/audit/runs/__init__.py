"""Lower bounds from counting: many runs of the real code in both worlds, and a test that was fixed beforehand.

A pilot plays every pair of worlds, scores every trial in every way that the view allows, and keeps the one pair, score
and threshold that promise the largest bound. Fresh trials then count how often that test says "first world" in either
world. Clopper-Pearson intervals on both rates, each at half of the error that is allowed, bound eps from below:
log((p_low - delta) / q_high). The pilot's trials are not used again, so its many choices cost nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import numpy as np
from scipy.stats import beta

from dovetail import _validate
from dovetail.audit.bounds import LowerBound
from dovetail.audit.runs.games import Game
from dovetail.audit.runs.scores import View, scores_of_trials
from dovetail.statements import Trust

__all__ = ["default_trials", "eps_from_counts", "lower_bound", "lower_bound_from_scores"]

_PILOT = 0.5  # trials of the pilot of each game, over those that are counted
_THRESHOLDS = 400  # on a score: so many evenly over the pilot's trials, and as many again towards either end
_WORK = 2e7  # reports that an audit draws in a world unless told otherwise
_MOST_TRIALS = 50_000
_LEAST_TRIALS = 500


class _Cut(NamedTuple):
    """A test that decides for `world` (0 or 1) where sign * score >= threshold.

    `promise` is the lower bound on eps that it gives on the pilot's trials.
    """

    world: int
    sign: int
    threshold: float
    promise: float

    def count_decisions(self, scores: np.ndarray) -> int:
        """In how many of these trials, given by their scores, it decides for its world."""
        return int(np.sum(self.sign * scores >= self.threshold))


class _Test(NamedTuple):
    """A test that a pilot chose: a pair of worlds, the name of a score, and a cut of it."""

    game: Game
    score: str
    cut: _Cut


def default_trials(game: Game) -> int:
    """As many trials as keep an audit within a minute or so."""
    return int(min(_MOST_TRIALS, max(_LEAST_TRIALS, _WORK / game.reports_per_trial)))


def lower_bound(
    games: list[Game],
    *,
    view: View,
    trust: Trust,
    delta: float,
    trials: int,
    confidence: float,
    seed: int,
    observe: Callable[[str], None] | None = None,
) -> LowerBound:
    """The best lower bound on eps that counting gives over these games.

    Arguments:
        games: the pairs of worlds to choose from.
        view: which adversary looks at the trials.
        trust: the model of trust of the certified statement, which says what the analyzer sees.
        trials: how many runs are counted in each world, after a pilot of half as many for every game.
        seed: of all randomness.
        observe: called with what is run next.

    Guarantees:
        Whatever the scores are, the bound exceeds the true eps with probability at most 1 - confidence.
        The same seed gives the same bound.
    """
    _validate.integer(trials=trials)
    _validate.at_least(10, trials=trials)
    _validate.in_open_interval(0, 1, confidence=confidence)
    pilot = max(10, int(_PILOT * trials))
    key = jax.random.key(seed)
    best: _Test | None = None
    for number, game in enumerate(games):
        if observe:
            observe(f"pilot: {game.worlds.name}")
        played = [
            _play_and_score(game, world, view, trust, pilot, jax.random.fold_in(key, 1 + number), trials)
            for world in (0, 1)
        ]
        for name in played[0]:
            test = _Test(game, name, _best_cut(played[0][name], played[1][name], delta, confidence))
            best = test if best is None or test.cut.promise > best.cut.promise else best
    if best is None:
        raise ValueError("there is no pair of worlds to tell apart: games is empty")
    if observe:
        observe(f"{best.score}: {best.game.worlds.name}")
    hits, alarms = (
        _count_fresh_decisions(best, world, view, trust, trials, jax.random.fold_in(key, 0))
        for world in (best.cut.world, 1 - best.cut.world)
    )
    eps = float(eps_from_counts(hits, alarms, trials, delta=delta, confidence=confidence))
    return LowerBound(
        eps=max(0.0, eps),
        delta=delta,
        attack=f"{best.score}; {best.game.worlds.name}",
        confidence=confidence,
        trials=2 * trials,
    )


def lower_bound_from_scores(scored: Mapping[str, np.ndarray], *, delta: float, confidence: float) -> LowerBound:
    """A lower bound from trials that were run elsewhere; too high with probability at most 1 - confidence.

    Arguments:
        scored: by its name, each score of the trials in both worlds, (2, trials). The first half of the trials is the
            pilot, the second is counted.
    """
    _validate.in_open_interval(0, 1, confidence=confidence)
    pilot = min(values.shape[1] for values in scored.values()) // 2
    _validate.at_least(5, pilot=pilot)
    clean = {name: np.where(np.isnan(values), np.inf, values) for name, values in scored.items()}
    cuts = {name: _best_cut(values[0, :pilot], values[1, :pilot], delta, confidence) for name, values in clean.items()}
    name, cut = max(cuts.items(), key=lambda item: item[1].promise)
    counted = clean[name][:, pilot : 2 * pilot]
    hits, alarms = (cut.count_decisions(counted[world]) for world in (cut.world, 1 - cut.world))
    eps = float(eps_from_counts(hits, alarms, pilot, delta=delta, confidence=confidence))
    return LowerBound(eps=max(0.0, eps), delta=delta, attack=name, confidence=confidence, trials=2 * pilot)


def eps_from_counts(
    hits: np.ndarray | int, alarms: np.ndarray | int, trials: int, *, delta: float, confidence: float
) -> np.ndarray:
    """The largest eps that a test refutes at this delta with this confidence; 0 or less where it refutes nothing.

    Arguments:
        hits: in how many of `trials` runs of the first world the test said "first"; a number or an array of them.
        alarms: in how many of `trials` runs of the second world it did.
    """
    error = (1 - confidence) / 2
    hits, alarms = np.asarray(hits, np.float64), np.asarray(alarms, np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        low = np.where(hits > 0, beta.ppf(error, np.maximum(hits, 0.5), trials - hits + 1), 0.0)
        high = np.where(alarms < trials, beta.isf(error, alarms + 1, np.maximum(trials - alarms, 0.5)), 1.0)
        return np.where(low > delta, np.log(np.maximum(low - delta, 1e-300) / high), 0.0)


def _play_and_score(
    game: Game, world: int, view: View, trust: Trust, trials: int, key: jax.Array, batch: int
) -> dict[str, np.ndarray]:
    """Run trials of a game in one world, and compute their scores: by name, (trials,). NaN counts as infinite."""
    played = game.play(world, trials=trials, key=key, batch=batch)
    batches = [scores_of_trials(game, trials_view, view=view, trust=trust) for trials_view in played]
    whole = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    return {name: np.where(np.isnan(score), np.inf, score) for name, score in whole.items()}


def _count_fresh_decisions(test: _Test, world: int, view: View, trust: Trust, trials: int, key: jax.Array) -> int:
    """In how many fresh trials of this world the test decides for its own world."""
    return test.cut.count_decisions(_play_and_score(test.game, world, view, trust, trials, key, trials)[test.score])


def _best_cut(first: np.ndarray, second: np.ndarray, delta: float, confidence: float) -> _Cut:
    """The cut that gives the largest bound on the pilot's own trials, whose intervals keep rare luck from being chosen.

    Arguments:
        first: the score of each trial of the first world; `second` likewise.
    """
    best = _Cut(world=0, sign=1, threshold=math.inf, promise=0.0)
    for world, sign in itertools.product((0, 1), (1, -1)):
        ours, theirs = (np.sort(sign * played) for played in ((first, second) if world == 0 else (second, first)))
        cuts = _thresholds_to_try(np.concatenate([ours, theirs]))
        hits, alarms = (len(played) - np.searchsorted(played, cuts) for played in (ours, theirs))
        promise = eps_from_counts(hits, alarms, len(ours), delta=delta, confidence=confidence)
        at = int(np.argmax(promise))
        if promise[at] > best.promise:
            best = _Cut(world, sign, float(cuts[at]), float(promise[at]))
    return best


def _thresholds_to_try(scores: np.ndarray) -> np.ndarray:
    """Thresholds to try: evenly over the trials, and finely where few of them are.

    Each lies midway between two neighbouring trials: laws that are far apart stay told apart in trials still to come.
    """
    rare = np.geomspace(1 / len(scores), 0.1, _THRESHOLDS)
    shares = np.concatenate([np.linspace(0, 1, _THRESHOLDS), rare, 1 - rare])
    trials = np.unique(scores)
    cuts = np.unique(np.quantile(scores, shares, method="nearest"))
    below = trials[np.maximum(np.searchsorted(trials, cuts) - 1, 0)]
    between = np.isfinite(below) & np.isfinite(cuts)
    cuts[between] -= (cuts[between] - below[between]) / 2
    return cuts
