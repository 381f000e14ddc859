"""Clip norms and server steps of a line-up of `dovetail compare`, searched without the test images.

MNIST's first 50,000 training images are trained on, its last 10,000 judged; the noise is calibrated once for each
protocol and eps, since it does not depend on clip or step. Prints the `tuned` lines of `dovetail/comparisons`.
"""

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import tomllib
from importlib import resources
from typing import Any

import msgspec

from dovetail import compare, experiment
from dovetail.data import Dataset, Task, resolve
from dovetail.randomness import Randomness

EPS, DELTA = (0.24, 1.0, 2.5), {"logistic": 5e-6, "scatter": 5e-6}
CLIPS, STEPS = (0.5, 1.0, 2.0), (0.25, 0.5, 1.0, 2.0, 4.0)


def held_out(*, folder: Any) -> Dataset:
    """MNIST's training images, the last 10,000 of them to test with."""
    whole = resolve("mnist").load(folder=folder)
    parts = {"inputs": whole.inputs[:50_000], "labels": whole.labels[:50_000], "test_inputs": whole.inputs[50_000:]}
    return dataclasses.replace(whole, **parts, test_labels=whole.labels[50_000:], subjects=None)


TASK = Task(name="mnist", load=held_out)


def search(job: tuple[str, str, float, dict[str, Any] | None, list[float], list[float]]) -> dict[str, Any]:
    """The best clip and step of a protocol at one eps, and all that was tried."""
    model, name, eps, cohort, clips, steps = job
    data = tomllib.loads((resources.files("dovetail") / "comparisons" / f"{model}.toml").read_text())["protocols"][name]
    overrides = [] if cohort is None else [("cohort", cohort)]
    (contender,) = compare.line_up(eps=eps, delta=DELTA[model], model=model, protocols=[name], overrides=overrides)
    config = contender.config
    field = data.get("clip")
    tried: list[tuple[float, float, float]] = []
    try:
        noisy = experiment.prepare(config, task=TASK).sampler.protocol
    except ValueError as error:
        return {"model": model, "protocol": name, "eps": eps, "cohort": cohort, "error": str(error)}
    noise = compare.noise_settings(noisy)
    _, clip, step = min(data["tuned"], key=lambda line: abs(math.log(line[0] / eps)))

    def run(clip: float, step: float) -> None:
        if (clip, step) in {(a, b) for a, b, _ in tried}:
            return
        clipped = {} if field is None else {field: clip}
        mine = msgspec.structs.replace(
            config,
            protocol={**config.protocol, **noise, **clipped},
            server=dataclasses.replace(config.server, learning_rate=step),
            privacy=msgspec.structs.replace(config.privacy, eps=None),
        )
        plan = experiment.prepare(mine, task=TASK).with_randomness(Randomness.from_os(mine.seed))
        training = plan.engine.start()
        for index in range(plan.num_rounds):
            training = plan.step(training, index, plan.sampler.schedule.draw_users(index))
        tried.append((clip, step, float(plan.engine.metrics(training)["accuracy"])))

    for a, b in itertools.product(clips if field else (1.0,), steps):
        run(clip * a, step * b)
    for _ in range(3):  # on along a border that is best
        best = max(tried, key=lambda trial: trial[2])
        for a, b in ((1.0, 2.0), (1.0, 0.5), (2.0, 0.5), (0.5, 2.0)):
            run(best[0] * a, best[1] * b)
    best = max(tried, key=lambda trial: trial[2])
    return {"model": model, "protocol": name, "eps": eps, "cohort": cohort, "best": best, "tried": tried}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="logistic", choices=compare.models_with_line_up())
    parser.add_argument("--protocols", nargs="*", default=[])
    parser.add_argument("--eps", type=float, nargs="*", default=EPS)
    parser.add_argument("--sizes", type=int, nargs="*", default=[], help="also these sizes of disjoint batches")
    parser.add_argument("--clips", type=float, nargs="*", default=CLIPS, help="factors on the line-up's clip")
    parser.add_argument("--steps", type=float, nargs="*", default=STEPS, help="factors on the line-up's server step")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    names = arguments.protocols or [
        contender.protocol
        for contender in compare.line_up(eps=1.0, delta=1e-5, model=arguments.model)
        if contender.config is not None
    ]
    cohorts = [{"kind": "disjoint", "size": size, "epochs": 1} for size in arguments.sizes] or [None]
    grid = list(arguments.clips), list(arguments.steps)
    jobs = [
        (arguments.model, name, eps, cohort, *grid) for name in names for eps in arguments.eps for cohort in cohorts
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for result in pool.imap_unordered(search, jobs):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
