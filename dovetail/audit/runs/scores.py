"""What an adversary makes of a trial: scores, one number for each way of looking at it.

In the shapes below, t are trials, r rounds, s slots and d coordinates; a table of reports is (trials, rounds, messages,
slots), with one column for each slot that a message fills.

Where a protocol knows the density of its reports, the score of a shuffled slot is its likelihood ratio. With f_0 and
f_1 the victim's densities and g that of everybody else's messages together, a slot with messages y_i has
log mean_i f_0/g(y_i) - log mean_i f_1/g(y_i); that is exact where all others hold the same, and a score like any other
elsewhere. Messages of colluders are known and taken out of the means. The other scores need nothing but the protocol's
own estimator: along the direction in which the worlds differ, applied to all messages, or to those alone that stand
where the victim's stood; the number of messages; the size of the estimate; how far it moves from round to round.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from dovetail.audit.runs.games import Game, TrialView
from dovetail.statements import Trust

__all__ = ["VIEWS", "View", "scores_of_trials"]

View = Literal["analyzer", "observer", "colluding"]
VIEWS: tuple[View, ...] = ("analyzer", "observer", "colluding")
_SMALL = 1e-300


def scores_of_trials(game: Game, trial: TrialView, *, view: View, trust: Trust) -> dict[str, np.ndarray]:
    """Every score of these trials that this adversary can compute.

    Arguments:
        trial: what a batch of trials shows: every array has the axes (trials, rounds, ...).
        view: the adversary. The *observer* sees estimates; the *analyzer* what the party sees that the certified
            statement is against; shuffler and analyzer *colluding* also see who sent what.
        trust: the model of trust. Where aggregators add up shares, the sum is all there is to see: the shares that some
            of them show are random numbers.

    Returns: by what it looks at, a score for each trial, (trials,). Only the order of a score's values counts, and
        either end may point to the first world, for the audit tries both; NaN counts as infinite. Names are unique, and
        stand in reports.
    """
    by_name = _score_estimates(game, trial)
    if view == "colluding" or (view == "analyzer" and trust is Trust.LOCAL):
        by_name |= _score_own_reports(game, trial)
    if view != "observer" and trust is Trust.SHUFFLE:
        by_name |= _score_messages(game, trial)
    return by_name


def _score_estimates(game: Game, trial: TrialView) -> dict[str, np.ndarray]:
    """The scores that need the released estimates and the public state alone.

    `trial.estimate` is (trials, rounds, dim), `trial.state` (trials, rounds, numbers): all leaves of a state, flat.
    """
    by_name = {
        "direction of the estimate": _project_on_difference(game, trial.estimate),
        "size of the estimate": np.log(np.maximum(_squared_norms(trial.estimate), _SMALL)),
        "public state": trial.state.sum(axis=(1, 2)).astype(np.float64),
    }
    if game.rounds > 1:
        by_name["change of the estimate"] = -_squared_norms(np.diff(trial.estimate, axis=1))
    return by_name


def _score_own_reports(game: Game, trial: TrialView) -> dict[str, np.ndarray]:
    """The scores of the victim's own reports, which are known to be the victim's."""
    by_name = {"direction of the victim's reports": _project_on_difference(game, trial.own)}
    if game.rounds > 1:
        by_name["change of the victim's reports"] = -_squared_norms(np.diff(trial.own, axis=1))
    if game.knows_likelihood:
        by_name["likelihood ratio of the victim's reports"] = _own_log_likelihood_ratio(game, trial)
        slots = game.protocol.layout(game.dim).slots
        reported = [
            _messages_by_slot(trial.own_slot, trial.own_value, trial.own_valid, i, slots)[1] for i in range(game.rounds)
        ]
        by_name["which coordinates the victim reports"] = _score_message_counts(
            game, np.stack([part.sum(axis=1) for part in reported], 1)
        )
    return by_name


def _score_messages(game: Game, trial: TrialView) -> dict[str, np.ndarray]:
    """The scores of all messages after the shuffle; some look for a shuffle that does not shuffle everything."""
    by_name = {
        "number of messages": _score_message_counts(game, trial.counts),
        "direction of the messages that stand first": _project_on_difference(game, trial.first),
    }
    if game.knows_likelihood:
        everything = trial.value.shape[2]
        by_name["likelihood ratio of the messages"] = _log_likelihood_ratio_of_messages(game, trial, everything)
        by_name["likelihood ratio of the first messages, should neighbours only be swapped"] = (
            _log_likelihood_ratio_of_messages(game, trial, min(2, everything))
        )
        by_name["likelihood ratio of the first half, should halves be shuffled"] = _log_likelihood_ratio_of_messages(
            game, trial, -(-everything // 2)
        )
        by_name["likelihood ratio of whole rows, should coordinates share a shuffle"] = (
            _log_likelihood_ratio_of_messages(game, trial, everything, rows_are_clients=True)
        )
    return by_name


def _project_on_difference(game: Game, estimate: np.ndarray) -> np.ndarray:
    """Estimates, (trials, rounds, dim), along the direction in which the worlds differ: (trials,)."""
    return np.einsum("trd,rd->t", estimate.astype(np.float64), game.worlds.direction)


def _squared_norms(values: np.ndarray) -> np.ndarray:
    """The squared norm of each trial's values over all rounds: (trials,)."""
    return np.sum(values.astype(np.float64) ** 2, axis=(1, 2))


def _score_message_counts(game: Game, counts: np.ndarray) -> np.ndarray:
    """The number of messages in slots where the victim is larger in the first world, less where it is smaller.

    The number of all messages, where the worlds do not differ in that. `counts` are (trials, rounds, slots).
    """
    held = np.abs(np.nan_to_num(game.worlds.victim)).sum(axis=2)
    weight = held[0] - held[1]
    if weight.shape[1] != counts.shape[2] or not weight.any():
        return counts.sum(axis=(1, 2)).astype(np.float64)
    return np.einsum("trs,rs->t", counts.astype(np.float64), np.sign(weight))


def _own_log_likelihood_ratio(game: Game, trial: TrialView) -> np.ndarray:
    """The log-likelihood ratio of the victim's reports over all rounds: (trials,)."""
    total = np.zeros(len(trial.own_value))
    for round_index in range(game.rounds):
        slots = game.protocol.layout(game.dim).slots
        value, valid = _messages_by_slot(trial.own_slot, trial.own_value, trial.own_valid, round_index, slots)
        first, second = (_victim_density(game, value, world, round_index) for world in (0, 1))
        visible = valid if first.shape == valid.shape else valid.any(axis=-1, keepdims=True)
        with np.errstate(invalid="ignore"):
            ratio = np.where(visible, first - second, 0.0)
        total += np.nan_to_num(ratio, posinf=1e9, neginf=-1e9).sum(axis=(1, 2))
    return total


def _log_likelihood_ratio_of_messages(
    game: Game, trial: TrialView, first_rows: int, *, rows_are_clients: bool = False
) -> np.ndarray:
    """The log-likelihood ratio of every slot's first `first_rows` messages, summed over slots and rounds: (trials,).

    Arguments:
        rows_are_clients: whether a row of messages, one for each slot, is taken to be one client's.
    """
    total = np.zeros(len(trial.value))
    slots = game.protocol.layout(game.dim).slots
    for round_index in range(game.rounds):
        value, valid = _messages_by_slot(trial.slot, trial.value, trial.valid, round_index, slots)
        ratios = _density_ratios(game, value[:, :first_rows], valid[:, :first_rows], round_index, rows_are_clients)
        if game.cohort.colluders and first_rows == value.shape[1]:
            colluders = _messages_by_slot(trial.known_slot, trial.known_value, trial.known_valid, round_index, slots)
            parts = _density_ratios(game, *colluders, round_index, rows_are_clients)
            ratios = [ratio - part for ratio, part in zip(ratios, parts, strict=True)]
        first, second = (np.log(np.maximum(ratio, _SMALL)).sum(axis=1) for ratio in ratios)
        total += first - second
    return total


def _density_ratios(
    game: Game, value: np.ndarray, valid: np.ndarray, round_index: int, rows_are_clients: bool
) -> list[np.ndarray]:
    """For either world and every slot: the sum over its messages of the victim's density over everybody else's.

    Arguments:
        value: messages of one round, (trials, messages, slots); `valid` says which are there.
        round_index: of the round.
        rows_are_clients: whether densities of a row are multiplied before they are summed: one column is left then.
    """
    rows_are_clients = rows_are_clients or game.protocol.layout(game.dim).linkage == "vector"
    background = _background_density(game, value)
    visible = valid if background.shape == valid.shape else valid.any(axis=-1, keepdims=True)

    def ratios(world: int) -> np.ndarray:
        log_ratio = _victim_or_dummy_density(game, value, world, round_index) - background
        if rows_are_clients:
            message = np.exp(np.where(visible, log_ratio, 0.0).sum(axis=-1, keepdims=True))
            return np.where(visible.any(axis=-1, keepdims=True), message, 0.0)
        return np.where(visible, np.exp(log_ratio), 0.0)

    return [ratios(world).sum(axis=1) for world in (0, 1)]


def _victim_or_dummy_density(game: Game, value: np.ndarray, world: int, round_index: int) -> np.ndarray:
    """The log density of the message that the victim adds to a slot: its report, or a dummy if it leaves that out."""
    own = _victim_density(game, value, world, round_index)
    included = game.protocol.inclusion_rate(game.dim)
    padding = game.protocol.layout(game.dim).padding
    if included == 1 or padding is None:
        return own
    return np.logaddexp(np.log(included) + own, np.log1p(-included) + padding.blanket.log_density(value))


def _background_density(game: Game, value: np.ndarray) -> np.ndarray:
    """The log of the mean density of the others' messages and the dummies, in the shape of `log_density`."""
    protocol = game.protocol
    others = game.worlds.others
    included = protocol.inclusion_rate(game.dim)
    total = 0.0
    weight = 0.0
    budgets = np.full(len(others), np.nan) if game.budgets is None else game.budgets[1:]
    kinds, times = np.unique(np.column_stack([budgets, others]), axis=0, return_counts=True, equal_nan=True)
    for (budget, *x), count in zip(kinds, times, strict=True):
        density = _log_density(game, value, np.asarray(x), None if np.isnan(budget) else float(budget))
        total = total + count * included * np.exp(density)
        weight = weight + count * included
    padding = protocol.layout(game.dim).padding
    if padding is not None and padding.pad_to > weight:
        dummies = padding.pad_to - weight
        total = total + dummies * np.exp(padding.blanket.log_density(value))
        weight = float(padding.pad_to)
    return np.log(np.maximum(total / weight, _SMALL))


def _victim_density(game: Game, value: np.ndarray, world: int, round_index: int) -> np.ndarray:
    """The log density of messages as reports of the victim in this world and round, if they are its reports."""
    budget = None if game.budgets is None else float(game.budgets[0])
    return _log_density(game, value, np.nan_to_num(game.worlds.victim[world, round_index, 0]), budget)


def _log_density(game: Game, value: np.ndarray, x: np.ndarray, budget: float | None) -> np.ndarray:
    """The protocol's log density of messages as reports on x; refuses a protocol that does not know it."""
    density = game.protocol.log_density(value, x, budget=budget)
    if density is None:
        raise ValueError(f"{game.protocol.name!r} does not know the density of its reports: it has no log_density")
    return density


def _messages_by_slot(
    slot: np.ndarray | tuple[()], value: np.ndarray, valid: np.ndarray, round_index: int, slots: int
) -> tuple[np.ndarray, np.ndarray]:
    """The messages of a round, (trials, messages, slots), and which are there, whatever slots each of them fills.

    Arguments:
        slot: the slot of each value; () where the columns are the slots already.
        round_index: of the round.
    """
    value = value[:, round_index]
    valid = valid[:, round_index]
    if isinstance(slot, tuple):
        return value, valid
    places = np.where(valid, slot[:, round_index], slots)
    filled = np.zeros((*value.shape[:2], slots + 1), value.dtype)
    np.put_along_axis(filled, places, value, axis=-1)
    there = np.zeros(filled.shape, bool)
    np.put_along_axis(there, places, valid, axis=-1)
    return filled[..., :slots], there[..., :slots]
