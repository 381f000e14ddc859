"""What a protocol owes, one function each: `OBLIGATIONS` by name.

Each function takes a `Bench`, returns nothing where the obligation is kept, and raises `ContractError` where it is
broken, or `NotOwed` where the protocol does not have it. Averages may be five standard errors off, and variances three.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from dovetail import accounting
from dovetail.mechanisms import ExactSampler
from dovetail.protocols import Contribution, Fast, Messages, Protocol, fast_path
from dovetail.shufflers import mask_absent
from dovetail.statements import NotApplicable
from dovetail.testing.bench import FAR, Bench, tally_from_messages, tally_from_sum, tally_on_fast_path

__all__ = ["OBLIGATIONS", "ContractError", "NotOwed", "pairs_of_log_densities", "refuse"]

_ERRORS = 5.0  # standard errors that an average may be off
_ROUNDING = 1e-6  # of float32, on updates of length about one
_QUIET = (1e-9, 0.02)  # noise so small that it does not show: multipliers, or one over budgets
_DENSITY_SAMPLES = 4000


class ContractError(AssertionError):
    """A protocol does not do what it owes; the message has a sentence for every broken obligation."""


class NotOwed(Exception):  # noqa: N818 - says what does not concern a protocol
    """An obligation that a protocol does not have, and why."""


def refuse(sentence: str) -> NoReturn:
    """Raise this sentence about a broken obligation."""
    raise ContractError(sentence)


def _standard_error(estimates: np.ndarray) -> np.ndarray:
    """The standard error of the mean of estimates, (runs, ...), over the runs."""
    return estimates.std(axis=0, ddof=1) / math.sqrt(len(estimates))


def _is_close(first: Any, second: Any) -> bool:
    """Whether two trees of arrays are equal up to the rounding of float32."""
    leaves = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.allclose(left, right, rtol=1e-4, atol=1e-4) for left, right in leaves)


def _select_rows(table: Any, rows: Any) -> Any:
    """These rows of every array in a tree."""
    return jax.tree.map(lambda leaf: leaf[rows], table)


def check_reports(bench: Bench) -> None:
    """Reports have the shape that `layout` declares, whatever the update."""
    layout = bench.protocol.layout(bench.dim)
    reports = bench.reports(bench.updates)
    value = np.asarray(reports.value)
    valid = np.asarray(reports.valid)
    if value.ndim != 2 or valid.shape not in ((bench.clients,), value.shape):
        refuse(
            f"`randomize` must give one value per report and `valid` once or per report, got value of shape "
            f"{value.shape[1:]} and valid of shape {valid.shape[1:]} from one client"
        )
    if reports.slot is None and value.shape[1] != layout.slots:
        refuse(f"reports without `slot` must fill all {layout.slots} slots of `layout`, got {value.shape[1]} reports")
    sent = np.broadcast_to(valid.reshape(len(valid), -1) > 0, value.shape)
    if sent.sum(axis=1).max() > layout.reports_per_client:
        refuse(f"`layout` allows {layout.reports_per_client} reports per client, got {sent.sum(axis=1).max()}")
    if reports.slot is not None:
        slots = np.broadcast_to(np.asarray(reports.slot), value.shape)[sent]
        if slots.size and (slots.min() < 0 or slots.max() >= layout.slots):
            refuse(f"slots must be 0 to {layout.slots - 1}, got slots from {slots.min()} to {slots.max()}")


def check_tally(bench: Bench) -> None:
    """Tallies add up over any split of the messages and do not depend on their order; absent clients add nothing."""
    reports = bench.reports(bench.updates)
    half = bench.clients // 2
    whole = bench.tally(reports)
    first = bench.tally(_select_rows(reports, slice(half)))
    parts = jax.tree.map(jnp.add, first, bench.tally(_select_rows(reports, slice(half, None))))
    if not _is_close(whole, parts):
        refuse("the tally is not additive: tallies of two halves of the messages do not add up to the tally of all")
    order = np.random.default_rng(1).permutation(bench.clients)
    if not _is_close(whole, bench.tally(_select_rows(reports, order))):
        refuse("the tally depends on the order of the messages")
    if not _is_close(first, bench.tally(mask_absent(reports, jnp.arange(bench.clients) < half))):
        refuse("the tally counts reports that are not valid: clients that are absent must add nothing")


def check_unbiased(bench: Bench, *, bias: float | None = None) -> None:
    """The estimate averages to the mean of `expected_update`, up to the stated `bias`.

    Arguments:
        bias: allowed in every coordinate; what the protocol states unless given.
    """
    allowed = bench.protocol.bias(bench.dim) if bias is None else bias
    for about, updates in (("updates of all sizes", bench.updates), ("updates beyond every clip norm", bench.corners)):
        truth = bench.expected_mean(updates)
        estimates = bench.estimates(updates, tally_from_messages)
        if not np.isfinite(estimates).all():
            refuse(f"the estimate is not finite on {about}")
        mean = estimates.mean(axis=0)
        spread = _standard_error(estimates)
        rounding = _ROUNDING * max(1.0, float(np.abs(truth).max()))
        excess = np.abs(mean - truth) - _ERRORS * (spread + rounding) - allowed
        if (excess > 0).any():
            worst = int(excess.argmax())
            refuse(
                f"the estimate is biased: on {about}, coordinate {worst} averages {mean[worst]:.4g} over {bench.runs} "
                f"rounds (standard error {spread[worst]:.2g}), and `expected_update` averages {truth[worst]:.4g} over "
                f"the clients; a bias must be stated by `bias`, which gives {allowed:.4g}"
            )
        size = float(truth @ truth)
        if size > 0:  # all coordinates together see a factor that each of them alone does not
            factors = estimates @ truth / size
            error = _ERRORS * float(_standard_error(factors)) + (allowed + rounding) * float(np.abs(truth).sum()) / size
            if abs(factors.mean() - 1) > error:
                refuse(
                    f"the estimate is biased: on {about} it is {factors.mean():.4g} times the mean of "
                    f"`expected_update`, where 1 within {error:.2g} is allowed"
                )


def check_noise(bench: Bench) -> None:
    """`noise_std` is the standard deviation of the estimate of zero updates."""
    estimates = bench.estimates(np.zeros_like(bench.updates), bench.quickest_path)[:, bench.dim // 5 :]
    declared = bench.protocol.noise_std(bench.clients, bench.dim)
    measured = float(estimates.std())
    if abs(measured - declared) > 3.9 / math.sqrt(2 * estimates.size) * declared + 1e-12:
        refuse(f"`noise_std` gives {declared:.4g}, but estimates of zero updates spread by {measured:.4g}")


def check_noiseless(bench: Bench) -> None:
    """Without noise the estimate is the plain mean of `expected_update`."""
    field = bench.protocol.noise_field
    for noise in (None,) if field is None else _QUIET[:1] if field == "noise_multiplier" else _QUIET:
        try:
            quiet = bench if noise is None else dataclasses.replace(bench, unsettled=bench.unsettled.with_noise(noise))
            for updates in (bench.updates, bench.corners):
                estimates = quiet.estimates(updates, tally_from_messages)
                if _standard_error(estimates).max() <= 2 * _ROUNDING:
                    _check_noiseless_mean(quiet, estimates.mean(axis=0), quiet.expected_mean(updates))
                    return
        except (ValueError, ArithmeticError):
            continue  # so little noise is refused
    raise NotOwed("its randomness does not vanish with its noise: it rounds, pads, or chooses at random")


def _check_noiseless_mean(quiet: Bench, mean: np.ndarray, truth: np.ndarray) -> None:
    """Refuse a noiseless mean that is not the truth, but for rounding and the stated bias."""
    off = np.abs(mean - truth)
    if off.max() > 1e-5 * max(1.0, float(np.abs(truth).max())) + quiet.protocol.bias(quiet.dim):
        worst = int(off.argmax())
        refuse(
            f"without noise the estimate must be the mean of `expected_update`: coordinate {worst} is "
            f"{mean[worst]:.6g}, not {truth[worst]:.6g}"
        )


def check_not_finite(bench: Bench) -> None:
    """An update with NaN or infinite entries adds no more than any other, and NaN counts as zero."""
    protocol = bench.protocol
    if protocol.private_steps:
        raise NotOwed("users clip records in steps of their own, before `randomize`")
    round = protocol.view(bench.cohort, bench.dim, neighbors=protocol.relation).round
    if accounting.reason_for_refusal([round]) is not None and not protocol.needs_norms:
        raise NotOwed("`view` promises nothing")
    path = bench.quickest_path
    place = 3 % bench.dim
    poisoned = bench.updates.copy()
    farthest = bench.updates.copy()
    poisoned[:4, place] = [np.nan, np.inf, -np.inf, 3e38]
    farthest[:4] = FAR
    estimate, usual, far = (bench.estimates(x, path) for x in (poisoned, bench.updates, farthest))
    if not np.isfinite(estimate).all():
        refuse("an update with NaN or infinite entries makes the estimate NaN or infinite; it must count as zero")
    change, most = (float(np.abs(x - usual).max()) for x in (estimate, far))
    if change > 1.5 * most + _ROUNDING:
        refuse(f"updates with NaN or infinite entries move the estimate by {change:.4g}, finite ones by {most:.4g}")
    nothing = np.full_like(bench.updates, np.nan)
    counts_as = bench.expected_mean(nothing)
    counts_as = np.where(np.isfinite(counts_as), counts_as, 0.0)
    estimates = bench.estimates(nothing, path)
    if not np.isfinite(estimates).all():
        refuse("updates that are NaN make the estimate NaN or infinite; they must count as zero")
    error = np.abs(estimates.mean(axis=0) - counts_as)
    spread = _standard_error(estimates)
    if (error > _ERRORS * (spread + _ROUNDING) + protocol.bias(bench.dim)).any():
        worst = int((error - _ERRORS * spread).argmax())
        refuse(
            f"updates that are NaN count as {estimates.mean(axis=0)[worst]:.4g} in coordinate {worst}, "
            f"and must count as {counts_as[worst]:.4g}"
        )


def _check_same_law(first: np.ndarray, second: np.ndarray, about: str) -> None:
    """Mean and variance of two sets of estimates, by a z-test and a ratio of variances."""
    spread = np.hypot(_standard_error(first), _standard_error(second)) + 1e-6
    off = np.abs((first.mean(axis=0) - second.mean(axis=0)) / spread)
    if off.max() > _ERRORS:
        refuse(f"{about} differ in their mean, by {off.max():.3g} standard errors in coordinate {int(off.argmax())}")
    ratio = (first.var(axis=0).mean() + 1e-14) / (second.var(axis=0).mean() + 1e-14)
    if abs(math.log(ratio)) > 2.8 * 2 / math.sqrt(first.size):  # whose standard error is 2 / sqrt(size)
        refuse(f"{about} differ in their variance, by a factor of {ratio:.4g}")


def check_fast(bench: Bench) -> None:
    """The fast path of `Fast` gives what the messages give: exactly, as `matches_messages_exactly` says, or in law."""
    path = fast_path(bench.protocol, bench.dim)
    if not isinstance(bench.protocol, Fast):
        raise NotOwed("it is not `Fast`")
    if not path.is_summable:
        raise NotOwed("sums do not serve under these settings")
    quick, slow = (bench.estimates(bench.updates, way) for way in (tally_on_fast_path, tally_from_messages))
    if path.matches_messages_exactly:
        if np.abs(quick - slow).max() > 1e-5:
            refuse(
                "`collect` and `finish` must give the tally of the messages from the same keys, for "
                "`matches_messages_exactly` says so"
            )
        return
    _check_same_law(quick, slow, "estimates by `collect` and `finish` and estimates from messages")


def check_sum(bench: Bench) -> None:
    """`tally_of_sum` has the law of the tally of the messages."""
    path = fast_path(bench.protocol, bench.dim)
    if path.scaling(jnp.ones(1), bench.protocol.init(bench.dim)) is None:
        raise NotOwed("`randomize` does more than to scale an update")
    quick, slow = (bench.estimates(bench.updates, way) for way in (tally_from_sum, tally_from_messages))
    _check_same_law(quick, slow, "estimates by `tally_of_sum` and estimates from messages")


def pairs_of_log_densities(bench: Bench) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Log densities of reports on their own update and on another one, for some pairs: (samples, columns) each."""
    protocol = bench.protocol
    state = bench.protocol.init(bench.dim)
    budget = None if protocol.budgets is None else float(max(protocol.budgets))
    samples = max(200, min(_DENSITY_SAMPLES, 200_000 // bench.dim))
    signs = np.resize([1.0, -1.0, 1.0], bench.dim)
    inputs = [np.zeros(bench.dim), FAR * signs, -FAR * signs]
    traced = None if budget is None else jnp.float32(budget)
    randomize = jax.jit(jax.vmap(lambda key, x: protocol.randomize(x, state, key=key, budget=traced), (0, None)))
    for number, (mine, other) in enumerate(((0, 1), (1, 0), (1, 2))):
        key = jax.random.fold_in(jax.random.key(7), number)
        reports = randomize(jax.random.split(key, samples), jnp.asarray(inputs[mine], jnp.float32))
        value = np.asarray(reports.value, np.float64)
        if reports.slot is not None:
            raise NotOwed("reports name their slots, and `log_density` is that of one column per slot")
        laws = [protocol.log_density(value, inputs[index], budget=budget) for index in (mine, other)]
        if laws[0] is None or laws[1] is None:
            raise NotOwed("it declares no `log_density`")
        valid = np.asarray(reports.valid)
        sent = np.broadcast_to(valid.reshape(len(valid), -1) > 0, value.shape)
        is_sent = sent if laws[0].shape == sent.shape else np.asarray(sent.any(axis=1, keepdims=True))
        yield np.where(is_sent, laws[0], 0.0), np.where(is_sent, laws[1], 0.0)


def check_density(bench: Bench) -> None:
    """`log_density` is the density of what `randomize` sends: likelihood ratios average to one."""
    for own, other in pairs_of_log_densities(bench):
        if np.isneginf(own).any():
            refuse("`randomize` sends reports that `log_density` calls impossible")
        ratio = np.exp(other - own)
        error = _ERRORS * float(ratio.std()) / math.sqrt(ratio.size) + 2e-3
        if abs(ratio.mean() - 1) > error and not np.isneginf(other).any():
            refuse(
                f"`log_density` is not the density of the reports of `randomize`: likelihood ratios average to "
                f"{ratio.mean():.4g}, where 1 within {error:.2g} is allowed"
            )


def check_messages(bench: Bench) -> None:
    """Deployed messages have one length and number, are all read back, and give the estimate of the simulation."""
    protocol = bench.protocol
    try:
        messages = protocol.messages(bench.dim)
    except NotApplicable as reason:
        raise NotOwed(str(reason)) from None
    sampler = ExactSampler()
    odd = [np.full(bench.dim, value) for value in (np.nan, np.inf, 0.0, FAR)]
    sent = [messages.randomize(x, sampler=sampler) for x in (*odd, *bench.updates)]
    for slot, body in sent:
        if slot.shape != (messages.per_client,) or body.shape != (messages.per_client, messages.size):
            refuse(
                f"every client must send {messages.per_client} messages of {messages.size} bytes, whatever its update, "
                f"got {body.shape[0]} of {body.shape[1]}"
            )
        if slot.min() < 0 or slot.max() >= messages.slots:
            refuse(f"messages must be in slots 0 to {messages.slots - 1}, got {slot.min()} to {slot.max()}")
    slot = np.concatenate([one.slot for one in sent[len(odd) :]])
    body = np.concatenate([one.body for one in sent[len(odd) :]])
    slot, body = _add_dummies(bench, messages, slot, body, sampler)
    order = np.random.default_rng(2).permutation(len(slot))
    reports, refused = messages.read(slot[order], body[order])
    if refused:
        refuse(f"`read` refuses {refused} of {len(slot)} messages of honest clients")
    _check_estimate(bench, protocol, protocol.tally(reports, bench.dim), "messages")


def _add_dummies(
    bench: Bench, messages: Messages, slot: np.ndarray, body: np.ndarray, sampler: ExactSampler
) -> tuple[np.ndarray, np.ndarray]:
    """The messages with the shuffler's dummies, where slots are padded."""
    padding = bench.protocol.layout(bench.dim).padding
    if padding is None:
        return slot, body
    lacking = np.maximum(0, padding.pad_to - np.bincount(slot, minlength=messages.slots))
    dummies = messages.dummies(int(lacking.sum()), sampler=sampler)
    return np.concatenate([slot, np.repeat(np.arange(messages.slots), lacking)]), np.concatenate([body, dummies])


def _check_estimate(bench: Bench, protocol: Protocol, tally: Any, about: str) -> None:
    """One estimate from exact randomness, against the law of the simulated ones."""
    state = protocol.init(bench.dim)
    estimate = np.asarray(protocol.estimate(tally, bench.clients, state, key=jax.random.key(0))[0], np.float64)
    estimates = bench.estimates(bench.updates, tally_from_messages)
    allowed = 6 * estimates.std(axis=0, ddof=1) + bench.protocol.bias(bench.dim) + 1e-5
    off = np.abs(estimate - estimates.mean(axis=0)) - allowed
    if not np.isfinite(estimate).all() or (off > 0).any():
        worst = int(off.argmax())
        refuse(
            f"the estimate from {about} is {estimate[worst]:.4g} in coordinate {worst}, where simulated ones average "
            f"{estimates.mean(axis=0)[worst]:.4g} and spread by {estimates.std(axis=0)[worst]:.2g}"
        )


def check_contribution(bench: Bench) -> None:
    """What clients share between aggregators has one length, and its sum gives the estimate of the simulation."""
    protocol, contribution = _settle_for_shares(bench)
    sampler = ExactSampler()
    budgets = protocol.budgets or (None,) * bench.clients
    shared = [contribution.draw(x, sampler=sampler, budget=b) for x, b in zip(bench.updates, budgets, strict=True)]
    shared += [part for _ in range(2) if (part := contribution.noise(sampler=sampler)) is not None]
    for part in shared:
        if part.shape != (contribution.length,):
            refuse(f"every client must share {contribution.length} integers, got shape={part.shape}")
        if contribution.proof is None and int(part.max()) >> contribution.bits:
            refuse(f"shared integers must be below 2^{contribution.bits}, got {int(part.max())}")
    total = np.sum([part.astype(np.int64) for part in shared], axis=0)
    if contribution.proof is None:
        total = (total & ((1 << contribution.bits) - 1)).astype(np.uint32)
    _check_estimate(bench, protocol, contribution.tally(total, bench.clients), "shared sums")


def _settle_for_shares(bench: Bench) -> tuple[Protocol, Contribution]:
    """The protocol settled for two aggregators (or as it settles without), and what its clients contribute.

    Raises `NotOwed` with the first refusal where it has no contribution.
    """
    reason = ""
    for cohort in (dataclasses.replace(bench.cohort, aggregators=2), bench.cohort):
        try:
            protocol = bench.unsettled.settle(cohort, bench.dim)
            contribution = protocol.contribution(cohort, bench.dim)
        except (NotApplicable, ValueError) as refusal:
            reason = reason or str(refusal)
            continue
        return protocol, contribution
    raise NotOwed(reason)


OBLIGATIONS: dict[str, Callable[[Bench], None]] = {
    "reports have the declared shape": check_reports,
    "tally adds up in any order": check_tally,
    "estimate is unbiased, or as biased as stated": check_unbiased,
    "noise is as declared": check_noise,
    "without noise it is the plain mean": check_noiseless,
    "NaN and infinity count as zero": check_not_finite,
    "fast path": check_fast,
    "sum path": check_sum,
    "density": check_density,
    "messages": check_messages,
    "contribution": check_contribution,
}
