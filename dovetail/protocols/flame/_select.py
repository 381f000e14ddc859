"""The k coordinates of an update that are largest in magnitude, by selection instead of sorting.

- Maxima of groups of coordinates give a threshold that a few more than k coordinates should reach.
- One pass marks who does (`coordinates_reaching`). If they are too few or too many, a secant search on the logarithm of
  their number, with bisection behind it, moves the threshold.
- The marked coordinates are listed, and the exact choice is made among those few.

Nothing depends on the guess but speed. Ties go to the lowest index; a search over indices runs only if there are any.
Where updates are short, every coordinate is compared with every other.

Sets of coordinates are words of bits (the end of this file). An update is cut into up to 32 planes of equal length, its
lanes: coordinate i is in lane i % lanes of plane i // lanes. A set is one uint32 a lane, with bit j for plane j, so
that marking whoever reaches a threshold is one elementwise pass over the planes. XLA vectorises that pass; the same as
a reduction it does not. Arrays have one row per client.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from dovetail import _validate
from dovetail._jax import jax, jnp, lax
from dovetail.mechanisms import _words

__all__ = [
    "PLANES",
    "Selected",
    "coordinates_reaching",
    "indices_below",
    "list_members",
    "magnitude_planes",
    "magnitudes",
    "num_lanes",
    "pick_entries",
    "row_sums",
    "set_sizes",
    "signed_counts",
    "top_candidates",
    "top_mask",
]

_SHORT = 64
_STEEPNESS = 4 / 2**23  # at first the count is thought to fall by 2^4 when the threshold doubles, 2^23 steps up


class Selected(NamedTuple):
    """Candidates, (clients, slots): their coordinates, and which k of a client's slots are its largest."""

    coordinate: jax.Array
    is_largest: jax.Array


class _Boundary(NamedTuple):
    """Where the k largest end, one boundary for each client.

    What is above `magnitude` is taken, and what is equal to it with an index below `cut`.
    """

    magnitude: jax.Array
    cut: jax.Array


def top_mask(x: jax.Array, k: int) -> jax.Array:
    """True at the k entries of largest |x| along the last axis; x is float32 of shape (..., dim).

    Guarantees:
        Exactly k entries are True in every row.
        Among equal magnitudes the lowest index comes first; NaN counts as 0, infinities as largest.
        Subnormal numbers keep their order.
    """
    rows = _materialize_once(x.reshape(-1, x.shape[-1]))
    _check_k(k, rows.shape[1])
    if rows.shape[1] <= _SHORT:
        return _top_mask_of_short_rows(rows, k).reshape(x.shape)
    _, _, boundary = _choose_candidates(rows, k)
    index = lax.broadcasted_iota(jnp.int32, rows.shape, 1)
    return _is_among_largest(magnitudes(rows), index, boundary).reshape(x.shape)


def top_candidates(xs: jax.Array, k: int) -> Selected:
    """The k entries of largest magnitude of every row of xs, (clients, dim), in lists a little longer than k.

    Guarantees:
        The coordinates of the chosen slots are those that `top_mask` marks, each once.
        Every index is a valid coordinate, chosen or not.
    """
    _check_k(k, xs.shape[1])
    xs = _materialize_once(xs)
    if xs.shape[1] <= _SHORT:
        return Selected(lax.broadcasted_iota(jnp.int32, xs.shape, 1), _top_mask_of_short_rows(xs, k))
    index, magnitude, boundary = _choose_candidates(xs, k)
    return Selected(index, _is_among_largest(magnitude, index, boundary))


def signed_counts(
    xs: jax.Array,
    k: int,
    clip_value: float,
    *,
    key: jax.Array,
    present: jax.Array | None = None,
    gamma: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """How many clients report a one and how many a zero, coordinate by coordinate: int32 of shape (dim,) each.

    Every row of xs, (clients, dim), is clipped to [-clip_value, clip_value], and its k entries of largest magnitude are
    rounded without bias to the upper end (one) or the lower (zero). With probability `gamma` a fair coin is reported
    instead; the gamma of `BinaryRandomizedResponse` gives its reports, from the same random word. `key` is one key, or
    one for each client. Clients that are not `present` report nothing.

    Guarantees:
        A client that is present adds exactly k to the counts, others nothing.
        A one has probability gamma / 2 + (1 - gamma) (1 + x / clip_value) / 2, to the precision of float32,
        independently for clients and coordinates; NaN counts as 0.
        With a key for each client the counts do not depend on how the clients are cut into chunks.
    """
    _validate.positive(clip_value=clip_value)
    _validate.in_interval(0, 1, gamma=gamma)
    clients, dim = xs.shape
    index, is_largest = top_candidates(xs, k)
    if present is not None:
        is_largest &= present[:, None]
    x = pick_entries(xs, index)
    clipped = jnp.where(jnp.isnan(x), 0.0, jnp.clip(x / clip_value, -1, 1))
    words = _words.random_words(key if key.ndim else jax.random.split(key, clients), index.shape[1], stored=True)
    unlikely = _words.toss_coins(gamma / 2 + (1 - gamma) * (0.5 - 0.5 * jnp.abs(clipped)), words)
    place = jnp.where(unlikely ^ (clipped > 0), index, index + dim)
    counts = jnp.zeros(2 * dim, jnp.int32).at[place].add(is_largest.astype(jnp.int32), mode="promise_in_bounds")
    return counts[:dim], counts[dim:]


def _materialize_once(xs: jax.Array) -> jax.Array:
    """The same numbers wherever they are compared: a compiler may compute them twice, and round differently."""
    return lax.optimization_barrier(xs)


def _check_k(k: int, dim: int) -> None:
    """Refuse a k that is no integer from 1 to dim."""
    _validate.integer(k=k)
    _validate.in_interval(1, dim, k=k)


def _top_mask_of_short_rows(rows: jax.Array, k: int) -> jax.Array:
    """The k largest entries of short rows, as a mask: those that fewer than k others come before."""
    magnitude = magnitudes(rows)
    mine, other = magnitude[:, :, None], magnitude[:, None, :]
    earlier = jnp.tri(rows.shape[1], k=-1, dtype=bool)
    return jnp.sum((other > mine) | ((other == mine) & earlier), axis=2) < k


def _choose_candidates(xs: jax.Array, k: int) -> tuple[jax.Array, jax.Array, _Boundary]:
    """Coordinates and magnitudes of the candidates, (clients, slots), and the boundary of the k largest of each row.

    Slots beyond a row's candidates have coordinate 0 and magnitude -1, below every boundary.
    """
    dim = xs.shape[1]
    most = min(dim, k + math.ceil(6 * math.sqrt(k)))
    maxima, rank = _group_maxima(xs, (k + most) / 2 / dim)
    top = jnp.max(maxima, axis=1) + 1
    guess = _bisect_threshold(
        lambda t: row_sums(maxima >= t[:, None]), rank - rank // 16, rank // 8, jnp.zeros_like(top), top
    )
    rough, words = _find_boundary(xs, k, most, guess, top)

    index = list_members(words, most)
    valid = lax.broadcasted_iota(jnp.int32, index.shape, 1) < set_sizes(words)[:, None]
    index = jnp.where(valid, index, 0)
    magnitude = jnp.where(valid, magnitudes(pick_entries(xs, index)), -1)
    exact = _bisect_threshold(lambda t: row_sums(magnitude >= t[:, None]), k, 0, rough.magnitude, top)
    equal = magnitude == exact[:, None]
    need = k - row_sums(magnitude > exact[:, None])
    cut = _cut_ties(lambda c: row_sums(equal & (index < c[:, None])), need, row_sums(equal) > need, dim)
    return index, magnitude, _Boundary(exact, jnp.minimum(rough.cut, cut))


def _group_maxima(xs: jax.Array, fraction: float) -> tuple[jax.Array, int]:
    """Maxima of groups of coordinates, and how many of them should reach a wanted threshold.

    Groups are as large as they can be while about half of them do.

    Arguments:
        xs: updates, (clients, dim).
        fraction: the part of all coordinates that reach that threshold.
    """
    size = PLANES
    while size > 1 and size * fraction > 1:
        size //= 2
    slices = magnitude_planes(xs)
    groups = [functools.reduce(jnp.maximum, slices[i : i + size]) for i in range(0, len(slices), size)]
    maxima = jnp.concatenate(groups, axis=1)
    return maxima, max(1, round(maxima.shape[1] * (1 - (1 - fraction) ** size)))


def _find_boundary(xs: jax.Array, k: int, most: int, guess: jax.Array, top: jax.Array) -> tuple[_Boundary, jax.Array]:
    """A boundary that k to `most` coordinates of each row reach, and these coordinates."""
    dim = xs.shape[1]
    lanes = num_lanes(xs.shape[1])
    low, words, above = _search_threshold(xs, k, most, guess, top)
    equal = words & ~above
    need = k - set_sizes(above)
    tied = set_sizes(words) > most
    cut = _cut_ties(lambda c: set_sizes(equal & indices_below(c, lanes)), need, tied, dim)
    return _Boundary(low, cut), above | (equal & indices_below(cut, lanes))


class _Bracket(NamedTuple):
    """A step of the threshold's search: `low` is reached by too many coordinates or just enough, `high` by too few."""

    low: jax.Array
    high: jax.Array
    at_low: jax.Array  # the coordinates that reach `low`, and those that reach `high`
    at_high: jax.Array
    turn: jax.Array


def _search_threshold(xs: jax.Array, k: int, most: int, guess: jax.Array, top: jax.Array) -> tuple[jax.Array, ...]:
    """A threshold that k to `most` coordinates of each row reach, these coordinates, and fewer than k of the largest.

    If ties leave no such threshold, it is the magnitude of the k-th largest, and the last are all that lie above it.
    Steps double until there is a bracket, then the logarithm of the count is interpolated; every third step bisects, so
    that the number of passes is bounded whatever the data.
    """
    aim = math.log2((k + most) / 2)

    def is_unfinished(bracket: _Bracket) -> jax.Array:
        return (set_sizes(bracket.at_low) > most) & (bracket.high - bracket.low > 1)

    def probe(bracket: _Bracket) -> jax.Array:
        """The next threshold to try for each client, strictly between `low` and `high` where those are apart."""
        low = bracket.low
        high = bracket.high
        turn = bracket.turn
        surplus = _log2_set_sizes(bracket.at_low) - aim
        lack = aim - _log2_set_sizes(bracket.at_high)
        growth = jnp.exp2(turn.astype(jnp.float32)) / _STEEPNESS
        between = (high - low) * (surplus / (surplus + lack))
        up = jnp.where(high < top, between, surplus * growth)
        ahead = jnp.where(low > 0, low + _to_whole_step(up), high - _to_whole_step(lack * growth))
        wanted = jnp.where(turn == 0, jnp.maximum(guess, 1), ahead)
        usable = (wanted > low) & (wanted < high) & (turn % 3 < 2)
        return jnp.where(usable, wanted, low + ((high - low) >> 1))

    def narrow(bracket: _Bracket) -> _Bracket:
        """The bracket after one more pass.

        Whoever has enough coordinates at the threshold moves `low`, others `high`.
        """
        threshold = probe(bracket)
        # Without the barrier XLA takes the magnitudes out of the loop and stores them plane by plane.
        words = coordinates_reaching(*lax.optimization_barrier((xs, threshold)))
        enough = set_sizes(words) >= k
        raised, lowered = is_unfinished(bracket) & enough, is_unfinished(bracket) & ~enough
        return _Bracket(
            low=jnp.where(raised, threshold, bracket.low),
            high=jnp.where(lowered, threshold, bracket.high),
            at_low=jnp.where(raised[:, None], words, bracket.at_low),
            at_high=jnp.where(lowered[:, None], words, bracket.at_high),
            turn=bracket.turn + 1,
        )

    zero = jnp.zeros_like(top)
    dim = xs.shape[1]
    every = indices_below(zero + dim, num_lanes(dim))
    start = _Bracket(zero, top, every, jnp.zeros_like(every), jnp.int32(0))
    done = lax.while_loop(lambda bracket: jnp.any(is_unfinished(bracket)), narrow, start)
    return done.low, done.at_low, done.at_high


def _log2_set_sizes(words: jax.Array) -> jax.Array:
    """The logarithm (base 2) of the size of each client's set; an empty one counts as half an element."""
    return jnp.log2(jnp.maximum(set_sizes(words), 0.5))


def _to_whole_step(step: jax.Array) -> jax.Array:
    """A step of the search as an int32 that cannot overflow."""
    return jnp.clip(step, 0, 2.0**29).astype(jnp.int32)


def _bisect_threshold(
    count: Callable[[jax.Array], jax.Array], least: jax.Array | int, slack: int, low: jax.Array, high: jax.Array
) -> jax.Array:
    """The largest threshold in [low, high) with count >= least, or any threshold with at most `slack` more.

    `count` falls as its argument grows, and is at least `least` at `low`; all arrays are integers, one per client.
    """

    def halve(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The interval after its middle is tried; it ends at once where the count there is close enough."""
        low, high = state
        middle = low + ((high - low) >> 1)
        reached = count(middle)
        end = jnp.where(reached <= least + slack, middle + 1, high)
        return jnp.where(reached >= least, middle, low), jnp.where(reached >= least, end, middle)

    return lax.while_loop(lambda state: jnp.any(state[1] - state[0] > 1), halve, (low, high))[0]


def _cut_ties(count_before: Callable[[jax.Array], jax.Array], need: jax.Array, tied: jax.Array, dim: int) -> jax.Array:
    """The index before which exactly `need` ties lie; `dim` where nothing is tied.

    Arguments:
        count_before: how many of each client's ties have an index below a cut.
        need: how many are to be taken.
        tied: which clients have more ties than that.
        dim: coordinates of an update.
    """
    last = jnp.where(tied, dim, 1)
    return dim - _bisect_threshold(lambda t: count_before(dim - t), need, 0, jnp.zeros_like(last), last)


def _is_among_largest(magnitude: jax.Array, index: jax.Array, boundary: _Boundary) -> jax.Array:
    """Which candidates are among the k largest; a mask in the shape of `magnitude`."""
    return magnitude >= boundary.magnitude[:, None] + (index >= boundary.cut[:, None])


PLANES = 32
_INFINITY = 0x7F800000


def magnitudes(x: jax.Array) -> jax.Array:
    """The bits of |x| as integers, which are ordered as |x| is; NaN counts as 0."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & 0x7FFFFFFF
    return jnp.where(bits > _INFINITY, 0, bits)


def num_lanes(dim: int) -> int:
    """The length of a plane, which is how many words a set of coordinates takes."""
    return -(-dim // PLANES)


def magnitude_planes(xs: jax.Array) -> list[jax.Array]:
    """The magnitudes of xs, (clients, dim), in planes of shape (clients, lanes); the last is filled up with -1."""
    dim = xs.shape[1]
    lanes = num_lanes(xs.shape[1])
    *full, last = [magnitudes(xs[:, begin : begin + lanes]) for begin in range(0, dim, lanes)]
    return [*full, jnp.pad(last, ((0, 0), (0, lanes - last.shape[1])), constant_values=-1)]


def coordinates_reaching(xs: jax.Array, threshold: jax.Array) -> jax.Array:
    """The set of coordinates whose magnitude reaches their client's threshold, as words of shape (clients, lanes)."""
    bits = [
        jnp.where(plane >= threshold[:, None], jnp.uint32(2**j), jnp.uint32(0))
        for j, plane in enumerate(magnitude_planes(xs))
    ]
    return functools.reduce(jnp.bitwise_or, bits)


def indices_below(cut: jax.Array, lanes: int) -> jax.Array:
    """The set of coordinates whose index is below their client's cut, as words of shape (clients, lanes)."""
    plane = lax.div(cut, jnp.int32(lanes))[:, None].astype(jnp.uint32)
    bit = jnp.where(plane < PLANES, jnp.left_shift(jnp.uint32(1), plane), jnp.uint32(0))
    lane = lax.broadcasted_iota(jnp.int32, (1, lanes), 1)
    return (bit - 1) | jnp.where(lane < lax.rem(cut, jnp.int32(lanes))[:, None], bit, jnp.uint32(0))


def set_sizes(words: jax.Array) -> jax.Array:
    """How many coordinates each client's set has, (clients,)."""
    return jnp.sum(_count_set_bits(words), axis=1)


def row_sums(rows: jax.Array) -> jax.Array:
    """The sum of each row, as int32; of an eighth of it at a time, for the sake of XLA's vectors."""
    eighth = rows.shape[1] // 8
    parts = [rows[:, i * eighth : (i + 1) * eighth].astype(jnp.int32) for i in range(8)]
    return jnp.sum(functools.reduce(jnp.add, parts), axis=1) + jnp.sum(rows[:, 8 * eighth :], axis=1, dtype=jnp.int32)


def list_members(words: jax.Array, slots: int) -> jax.Array:
    """The coordinates in each set, lane by lane, (clients, slots); entries after a set's last one mean nothing."""
    lanes = words.shape[1]
    ends = jnp.cumsum(_count_set_bits(words), axis=1)
    rank = lax.broadcasted_iota(jnp.int32, (1, slots), 1)
    # How many lanes end at or before this rank: by sixteenths at first, then by bisection. That is a loop, because XLA
    # computes `ends` again in every unrolled step.
    steps = max(0, lanes.bit_length() - 4)
    passed = [ends[:, lane - 1, None] <= rank for lane in range(2**steps, lanes + 1, 2**steps)]
    lane = functools.reduce(jnp.add, [step.astype(jnp.int32) for step in passed]) << steps

    def halve(step: jax.Array, lane: jax.Array) -> jax.Array:
        ahead = lane + jnp.left_shift(1, steps - 1 - step)
        passed = (ahead <= lanes) & (pick_entries(ends, jnp.minimum(ahead, lanes) - 1) <= rank)
        return jnp.where(passed, ahead, lane)

    lane = jnp.minimum(lax.fori_loop(0, steps, halve, lane), lanes - 1)
    word = pick_entries(words, lane)
    return _position_of_set_bit(word, rank - pick_entries(ends, lane) + _count_set_bits(word)) * lanes + lane


def pick_entries(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Entry index[i, j] of row i, for indices that are known to be valid."""
    return jnp.take_along_axis(rows, index, axis=1, mode="promise_in_bounds")


def _count_set_bits(words: jax.Array) -> jax.Array:
    """How many bits of each word are set, as int32."""
    return lax.population_count(words).astype(jnp.int32)


def _position_of_set_bit(word: jax.Array, rank: jax.Array) -> jax.Array:
    """The position of the set bit of this rank, counted from the lowest."""
    position = jnp.zeros_like(rank)
    for width in (16, 8, 4, 2, 1):
        low = word & jnp.uint32(2**width - 1)
        higher = rank >= _count_set_bits(low)
        rank = jnp.where(higher, rank - _count_set_bits(low), rank)
        word = jnp.where(higher, word >> width, low)
        position = jnp.where(higher, position + width, position)
    return position
