"""The accountant: against a yardstick of the same run, against other accountants, and at the largest sizes.

The yardstick is one `scipy.stats.binom.cdf` call on a million points. Peers answer the same question as Dovetail, a
Poisson-sampled Gaussian over many rounds: dp-accounting (Google), and prv-accountant (Microsoft) where it is installed
(``pip install prv-accountant``). ``--largest`` asks every protocol at n = 1e6, d = 1e6 and 1e4 rounds, each in a
process of its own, by `account` and by `calibrate`, in processor seconds. Nothing is cached between repetitions.
"""

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import pld_privacy_accountant
from rich.console import Console
from rich.table import Table
from scipy.stats import binom

from dovetail.accounting import compose
from dovetail.accounting.amplification import clones
from dovetail.accounting.pairs import binomial, personal
from dovetail.accounting.releases import crowds, personalized
from dovetail.events import Gaussian, Personalized, Poisson, Report, Round, Shuffled
from dovetail.statements import Neighbors

QUESTIONS = ((0.01, 1.0, 1000, 1e-6), (0.01, 1.0, 1000, 1e-12), (0.001, 0.7, 10_000, 1e-6))
LARGEST: dict[str, dict[str, Any]] = {
    "apes": {"budgets": "uniform2", "budget_scale": 1.0},
    "s_apes": {"budgets": "uniform2", "budget_scale": 1.0, "keep": 0.2},
    "unis": {"budgets": "uniform2", "budget_scale": 1.0},
    "pldp": {"budgets": "uniform2", "budget_scale": 1.0},
    "ldp_min": {"budgets": "uniform2", "budget_scale": 1.0},
    "ss_simple": {"eps_local": 0.01},
    "ss_double": {"eps_local": 0.5, "beta": 0.02},
    "ss_topk": {"eps_local": 0.5, "k": 20_000},
    "privunit": {"eps_local": 4.0},
    "binary_sum": {"eps_local": 1.0},
    "real_sum": {"eps_local": 1.0},
    "split_and_mix": {"noise_multiplier": 500.0},
    "dp_fl": {"noise_multiplier": 500.0},
    "ldp_fl": {"noise_multiplier": 500.0},
}

NOISE = ("budget_scale", "eps_local", "noise_multiplier")
AMPLIFY = ("--n", "1000000000", "--eps-local", "1", "--delta", "1e-10")


def yardstick() -> None:
    binom.cdf(np.arange(1_000_000), 1_000_000, 0.5)


def numerical_clones() -> None:
    clones._smallest_eps.cache_clear()
    report = Report(kind="generic", eps_local=1.0)
    clones.numerical23(Shuffled(report=report, num_users=1_000_000), delta=1e-6)


def renyi_coordinates() -> None:
    binomial._compact_law_of_coins.cache_clear()
    report = Report(kind="generic", eps_local=0.5)
    crowds.renyi(Shuffled(report=report, num_users=1000, coordinates=7850), crowds.ORDERS)


def personal_budgets() -> None:
    for cached in (personal.victim_groups, personal._draws_for_any_victim, personalized._pairs_by_group):
        cached.cache_clear()
    budgets = tuple(np.linspace(0.05, 1.0, 10_000).tolist())
    personalized.eps(Personalized(kind="clip_laplace", eps_locals=budgets, coordinates=7850), delta=3.6e-5)


WORK: dict[str, tuple[Callable[[], None], float]] = {
    "clones23-numerical, n = 1e6": (numerical_clones, 3.0),
    "Renyi over d = 7850 coordinates, n = 1000": (renyi_coordinates, 10.0),
    "personal budgets, n = 10,000, d = 7850, every user": (personal_budgets, 30.0),
}


def seconds(work: Callable[[], Any], times: int = 5) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return min(taken)


def ours(prob: float, noise: float, rounds: int, delta: float) -> float:
    compose._curve.cache_clear()
    mechanism = Gaussian(std=noise, sensitivity=1.0, neighbors=Neighbors.ADD_REMOVE)
    return compose.bound([Round(mechanism=mechanism, participation=Poisson(prob=prob))] * rounds, delta=delta).eps


def google(prob: float, noise: float, rounds: int, delta: float) -> float:
    accountant = pld_privacy_accountant.PLDAccountant()
    accountant.compose(dp_event.PoissonSampledDpEvent(prob, dp_event.GaussianDpEvent(noise)), rounds)
    return float(accountant.get_epsilon(delta))


def microsoft(prob: float, noise: float, rounds: int, delta: float) -> float:
    from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

    mechanism = PoissonSubsampledGaussianMechanism(noise_multiplier=noise, sampling_probability=prob)
    accountant = PRVAccountant(
        prvs=[mechanism], max_self_compositions=[rounds], eps_error=0.01, delta_error=delta / 1000
    )
    return float(accountant.compute_epsilon(delta=delta, num_self_compositions=[rounds])[2])


PEERS = {"dovetail": ours, "dp-accounting": google, "prv-accountant": microsoft}


def beside_peers() -> list[dict[str, Any]]:
    rows = []
    for question in QUESTIONS:
        for name, ask in PEERS.items():
            if name == "prv-accountant" and importlib.util.find_spec("prv_accountant") is None:
                continue
            try:
                eps: float | str = ask(*question)
                taken = seconds(lambda ask=ask, question=question: ask(*question), 2)
            except (ValueError, RuntimeError) as error:
                eps = f"refuses: {error}"[:60]
                taken = float("nan")
            rows.append({"question": question, "who": name, "eps": eps, "seconds": taken})
    return rows


def at_the_largest() -> list[dict[str, Any]]:
    rows = []
    for name, settings in LARGEST.items():
        dim = 1 if name.endswith("_sum") else 10**6
        options = [name, "--n", "1000000", "--dim", str(dim), "--rounds", "10000", "--delta", "1e-6"]
        free = {key: value for key, value in settings.items() if key not in NOISE}
        rows.append({"protocol": name, **time_process(["account", "protocol", *options, *words(settings)])})
        rows.append({"protocol": name, **time_process(["calibrate", "--eps", "1", *options, *words(free)])})
    rows.append({"protocol": "amplify, n = 1e9", **time_process(["account", "amplify", *AMPLIFY])})
    return rows


def words(settings: dict[str, Any]) -> list[str]:
    return [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]


def time_process(command: list[str]) -> dict[str, Any]:
    """The processor seconds of a whole process on one thread, imports included, and what it says first."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.run(
        [sys.executable, "-m", "dovetail.cli", *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    lines = (process.stdout or process.stderr).splitlines()
    statement = next((line for line in lines if "-DP" in line or "dovetail:" in line), lines[-1] if lines else "")
    return {"command": command[0], "seconds": taken, "statement": statement.strip()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--largest", action="store_true", help="also every protocol at n = 1e6, d = 1e6, 1e4 rounds")
    arguments = parser.parse_args()
    unit = seconds(yardstick)
    rows = [
        {"work": name, "seconds": taken, "yardsticks": taken / unit, "aim": aim}
        for name, (work, aim) in WORK.items()
        for taken in [seconds(work)]
    ]
    peers = beside_peers()
    largest = at_the_largest() if arguments.largest else []
    if arguments.json:
        results = {"yardstick_seconds": unit, "rows": rows, "peers": peers, "largest": largest}
        print(json.dumps({"benchmark": "accounting", **results}))
        return
    table = Table("work", "seconds", "yardsticks", "aim")
    table.add_row("binom.cdf on a million points", f"{unit:.4f}", "1.00", "")
    for row in rows:
        table.add_row(row["work"], f"{row['seconds']:.4f}", f"{row['yardsticks']:.2f}", f"at most {row['aim']:g}")
    Console().print(table)
    table = Table("sampling rate, noise, rounds, delta", "accountant", "eps", "seconds")
    for row in peers:
        table.add_row(str(row["question"]), row["who"], str(row["eps"]), f"{row['seconds']:.3f}")
    Console().print(table)
    if largest:
        table = Table("protocol at n = 1e6, d = 1e6, 1e4 rounds", "command", "processor seconds", "statement")
        for row in largest:
            table.add_row(row["protocol"], row["command"], f"{row['seconds']:.2f}", row["statement"][:80])
        Console().print(table)


if __name__ == "__main__":
    main()
