"""The inner loop of SS-Topk: seconds per round for Dovetail and for NumPy, side by side in one run.

1000 updates of d = 7850: clipped, the k = 157 largest coordinates of each rounded to a bit without bias, randomized
response at eps_local 0.5; every coordinate padded with fair coins to 333 messages; summed per coordinate. NumPy uses
argpartition and draws one binomial per coordinate for the dummies: on whole arrays, as one would write it; and, to be
fair, clipping only what was selected, in chunks that fit the cache, on one thread and on two. Both sides draw from the
same law: the mean square of their difference, in standard deviations, is printed and should be 1. They take turns, and
each one's fastest turn counts.

Then 10,000 updates of d = 1,000,000, k = 10,000, made on the fly, in a process of its own: seconds and peak memory.
"""

import argparse
import concurrent.futures
import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.table import Table

from dovetail.engine.devices import AXIS, make_mesh, split_over_devices, use_all_cores
from dovetail.mechanisms import BinaryRandomizedResponse, _words
from dovetail.protocols.flame.ss_topk import SsTopk

CLIENTS, DIM, K = 1000, 7850, 157
MANY_CLIENTS, LARGE_DIM, LARGE_K = 10_000, 1_000_000, 10_000
PAD_TO, CLIP, EPS_LOCAL = 333, 3.0, 0.5
CHUNK, NUMPY_CHUNK, TURNS, AIM = 50, 25, 40, 5.0
REPORT = BinaryRandomizedResponse(EPS_LOCAL)

Updates = Callable[[jax.Array, jax.Array], jax.Array]


def dovetail_round(updates: Updates, *, clients: int, dim: int, k: int, chunk: int) -> Callable[..., jax.Array]:
    """One compiled round over all devices; `updates(ids, rows)` are those of a chunk of clients."""
    mesh = make_mesh()
    chunks = clients // (mesh.size * chunk)
    protocol = SsTopk(k=k, clip_value=CLIP, eps_local=EPS_LOCAL, decoys=0, pad_to=PAD_TO)

    def of_device(rows: jax.Array, key: jax.Array) -> jax.Array:
        def chunk_of(i: jax.Array) -> Any:
            ids = (jax.lax.axis_index(AXIS) * chunks + i) * chunk + jnp.arange(chunk)
            keys = jax.vmap(jax.random.fold_in, (None, 0))(key, ids)
            xs = updates(ids, jax.lax.dynamic_slice_in_dim(rows, i * chunk, chunk) if rows.size else rows)
            return protocol.collect(xs, ids < clients, (), keys=keys)

        shapes = jax.eval_shape(chunk_of, 0)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        added = jax.lax.fori_loop(0, chunks, lambda i, total: jax.tree.map(jnp.add, total, chunk_of(i)), nothing)
        return protocol.finish(jax.lax.psum(added, AXIS), key=jax.random.fold_in(key, clients)).total

    specs = (PartitionSpec(AXIS), PartitionSpec())
    return jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False))


def plain_numpy_round(xs: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The protocol's steps one after the other, on whole arrays."""
    clipped = np.clip(xs, -CLIP, CLIP)
    index = np.argpartition(-np.abs(xs), K - 1, axis=1)[:, :K]
    prob = REPORT.gamma / 2 + REPORT.prob_truth * (1 + np.take_along_axis(clipped, index, axis=1) / CLIP) / 2
    ones = np.bincount(index[rng.random(index.shape) < prob], minlength=DIM)
    return ones + rng.binomial(PAD_TO - np.bincount(index.ravel(), minlength=DIM), 0.5)


def numpy_reports(xs: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    index = np.argpartition(-np.abs(xs), K - 1, axis=1)[:, :K]
    share = np.clip(np.take_along_axis(xs, index, axis=1) / CLIP, -1, 1)
    prob = REPORT.gamma / 2 + REPORT.prob_truth * (1 + share) / 2
    ones = index[rng.random(index.shape, np.float32) < prob]
    return np.bincount(ones, minlength=DIM), np.bincount(index.ravel(), minlength=DIM)


def numpy_round(xs: np.ndarray, generators: list[np.random.Generator]) -> np.ndarray:
    """On as many threads as there are generators; argpartition and the draws release the lock."""

    def share(part: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return np.sum([numpy_reports(part[i : i + NUMPY_CHUNK], rng) for i in range(0, len(part), NUMPY_CHUNK)], axis=0)

    parts = np.array_split(xs, len(generators))
    if len(generators) == 1:
        ones, messages = share(parts[0], generators[0])
    else:
        with concurrent.futures.ThreadPoolExecutor(len(generators)) as pool:
            ones, messages = sum(pool.map(share, parts, generators))
    return ones + generators[0].binomial(PAD_TO - messages, 0.5)


def rounds() -> list[dict]:
    """Seconds per round of the three engines, taking turns."""
    xs = np.random.default_rng(0).normal(size=(CLIENTS, DIM)).astype(np.float32)
    compiled = dovetail_round(lambda ids, rows: rows, clients=CLIENTS, dim=DIM, k=K, chunk=CHUNK)
    rows = split_over_devices(xs, make_mesh(), axis=0)
    generators = np.random.default_rng(1).spawn(2)
    keys = iter(jax.random.split(jax.random.key(0), TURNS + 1))
    engines: dict[str, Callable[[], object]] = {
        "dovetail": lambda: np.asarray(compiled(rows, next(keys))),
        "NumPy": lambda: plain_numpy_round(xs, generators[0]),
        "NumPy in chunks": lambda: numpy_round(xs, generators[:1]),
        "NumPy in chunks, two threads": lambda: numpy_round(xs, generators),
    }
    sums = {name: np.asarray(engine()) for name, engine in engines.items()}  # compiles, too
    best = dict.fromkeys(engines, np.inf)
    for _ in range(TURNS):
        for name, engine in engines.items():
            began = time.perf_counter()
            engine()
            best[name] = min(best[name], time.perf_counter() - began)
    return [
        {
            "engine": name,
            "seconds": seconds,
            "dovetail_is_faster_by": seconds / best["dovetail"],
            "squared_difference": float(np.mean((sums[name] - sums["dovetail"]) ** 2) / (2 * PAD_TO / 4)),
        }
        for name, seconds in best.items()
    ]


def run_large_round() -> dict:
    """The large round: no update is held longer than its chunk."""

    def updates(ids: jax.Array, rows: jax.Array) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), ids)
        uniform = jax.lax.bitcast_convert_type(_words.random_words(keys, LARGE_DIM), jnp.int32) * jnp.float32(2.0**-31)
        return CLIP * uniform**3

    use_all_cores()
    build = functools.partial(dovetail_round, updates, dim=LARGE_DIM, k=LARGE_K, chunk=1)
    nothing = jnp.zeros((jax.device_count(), 0))
    compiled = build(clients=MANY_CLIENTS).lower(nothing, jax.random.key(0)).compile()
    began = time.perf_counter()
    jax.block_until_ready(compiled(nothing, jax.random.key(0)))
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"clients": MANY_CLIENTS, "dim": LARGE_DIM, "k": LARGE_K, "seconds": seconds, "peak_rss_mb": peak}


def streamed_alone() -> dict:
    command = [sys.executable, __file__, "--streamed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        raise RuntimeError(f"the streamed round failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--streamed", action="store_true", help="only the large round, in this process")
    arguments = parser.parse_args()
    if arguments.streamed:
        print(json.dumps(run_large_round()))
        return
    use_all_cores()
    results = rounds()
    large = streamed_alone()
    if arguments.json:
        print(json.dumps({"benchmark": "shuffle", "aim": AIM, "rows": results, "streamed": large}))
        return
    table = Table("engine", "s/round", "Dovetail is faster by", "aim", "same law: mean squared difference (1)")
    for row in results:
        ours = row["engine"] == "dovetail"
        table.add_row(
            row["engine"],
            f"{row['seconds']:.4f}",
            f"{row['dovetail_is_faster_by']:.1f}x",
            f"at least {AIM:g}x" if row["engine"] == "NumPy" else "",
            "" if ours else f"{row['squared_difference']:.3f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"streamed: {large['clients']:,} clients, d = {large['dim']:,}, k = {large['k']:,}: "
        f"{large['seconds']:.1f} s with the making of the updates, {large['peak_rss_mb']:.0f} MB peak "
        "(aim: under 1000)",
        highlight=False,
    )


if __name__ == "__main__":
    main()
