"""Settings chosen by training with several of them, under one statement that covers all that was tried.

python examples/tuned.py
"""

from __future__ import annotations

import numpy as np
from rich.console import Console

import dovetail
from dovetail.experiment.result import headline


def table() -> dovetail.Dataset:
    """A number to predict from three, for 1,500 users with one record each; 300 records to test with are public."""
    rng = np.random.default_rng(0)
    inputs = rng.uniform(-1, 1, (1800, 3)).astype(np.float32)
    numbers = inputs @ np.array([0.5, -0.3, 0.1]) + 0.05 * rng.normal(size=1800)
    test = (inputs[1500:], numbers[1500:])
    return dovetail.Dataset.from_arrays(inputs[:1500], numbers[:1500], test=test)


# [tune]
def tune() -> dovetail.Result:
    """The better of two clip norms, by R2 on public test records; both trials together are (4, 1e-5)."""
    return dovetail.tune(
        table(),
        space={"protocol.clip_norm": [0.03, 0.3]},
        eps=4.0,
        score="r2",
        public_test=True,
        by="composition",
        settings={"cohort.rounds": 20},
    )


# [end]
def main() -> None:
    """Tune, and say what was chosen and what it cost."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    result = tune()
    console.print(f"chosen {result.tuning['chosen']}: {headline(result.metrics, result.baseline)}")
    console.print(result.statement.headline())


if __name__ == "__main__":
    main()
