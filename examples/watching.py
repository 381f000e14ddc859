"""Watch a training: a callback of one's own, TensorBoard, and stopping early.

python examples/watching.py [FOLDER]
"""

# [imports]
from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

import dovetail
from dovetail.watching import EarlyStopping, LivePage, TensorBoard


# [own]
class Best(dovetail.Callback):
    """Keeps the best accuracy, and the round that it was reached in."""

    def __init__(self) -> None:
        self.accuracy, self.round = 0.0, 0

    def on_round(self, progress: dovetail.experiment.Progress) -> None:
        """After each round; scores are new where `fresh` says so."""
        if progress.fresh and progress.accuracy is not None and progress.accuracy > self.accuracy:
            self.accuracy, self.round = progress.accuracy, progress.round


# [train]
def train(folder: Path) -> tuple[dovetail.Result, Best]:
    """Train on the digits, watched by four callbacks."""
    best = Best()
    callbacks = [
        best,
        LivePage(folder / "live.html"),
        TensorBoard(folder / "events"),
        EarlyStopping("accuracy", public_test=True, patience=5),
    ]
    return dovetail.train("digits", eps=2.0, out=folder / "run", callbacks=callbacks), best


# [end]
def main() -> None:
    """Train, and say how it went."""
    result, best = train(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/watched"))
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"best: {best.accuracy:.1%} after round {best.round}; at the end {result.accuracy:.1%}")
    console.print(f"{result.rounds} rounds were run, {result.charged_rounds} are charged")
    console.print(str(result.statement))


if __name__ == "__main__":
    main()
