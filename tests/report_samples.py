"""Small made-up data files for pages: a comparison, a paper with two exhibits, an index."""

import dataclasses
import json

from dovetail.compare import Comparison, Costs, Outcome, Run
from dovetail.figures import Figure, Line
from dovetail.statements import Bound, Neighbors, Scope, Theorem, Trust, Unit, Verdict, no_guarantee

SCOPE = Scope(
    trust=Trust.SHUFFLE,
    adversary="analyzer",
    neighbors=Neighbors.REPLACE_ONE,
    unit=Unit.USER,
    assumptions=("shuffler and analyzer do not collude", "hyper-parameters were chosen without the private data"),
)
LOCAL = dataclasses.replace(SCOPE, trust=Trust.LOCAL, adversary="shuffler and analyzer, and everyone else")
BY = Theorem(key="FMT23.thm3.2+CKS20.prop12", where="the clone pair of Feldman, McMillan, Talwar (SODA 2023), Thm. 3.2")
EVIL = '<script>alert("x")</script> & <b>bold</b>'


def certified(eps, scope=SCOPE, delta=5e-6):
    premise = scope.state(Bound(eps=eps / 2, delta=delta, proof=BY.proof), Verdict.CERTIFIED, span="one of 60 rounds")
    return scope.state(
        Bound(eps=eps, delta=delta, proof=BY.proof), Verdict.CERTIFIED, span="60 rounds", premises=(premise,)
    )


def claimed(eps, verdict):
    theorem = Theorem(key="FLAME.thm3", where="FLAME (AAAI 2021), Thm. 3 and 4; what became of it")
    return SCOPE.state(Bound(eps=eps, delta=5e-6, proof=theorem.proof), verdict, span="60 rounds")


def comparison(folder):
    """Five protocols, one of them left out."""
    facts = [
        ("split_and_mix", "two shufflers that do not collude", 2, 0.911, 21_000_000, 5_200_000),
        ("dp_fl", "the curator", 0, 0.921, 31_000, 1),
        ("ss_topk", "one shuffler that does not work with the analyzer", 1, 0.887, 130_000, 7850),
        ("privunit", "one shuffler that does not work with the analyzer", 1, 0.612, 1100, 1),
    ]
    found = Comparison(task="mnist", model="logistic", eps=1.0, delta=5e-6, seeds=3)
    for name, trust, shufflers, mean, size, messages in facts:
        run = Run(
            accuracies=(mean - 0.004, mean, mean + 0.004),
            certified=certified(1.0),
            local=no_guarantee(LOCAL, reason="all see all") if shufflers == 2 else certified(34.3, LOCAL),
            shuffler=None,
            trust=trust,
            shufflers=shufflers,
            may_collude=int(shufflers == 2),
            costs=Costs(messages=messages, bytes=size, server_seconds=0.21),
            rounds=60,
            seconds_per_round=0.02,
            settings={"clip_norm": 1.0},
            server_step=0.3,
            version="0.1",
            machine="2 cores",
        )
        found = found.with_outcome(Outcome(protocol=name, run=run))
    found = found.with_outcome(Outcome(protocol="fedavg", reason=f"nothing is certified {EVIL}"))
    folder.mkdir(parents=True, exist_ok=True)
    found.write(folder)
    return folder


def row(label, eps_claimed, verdict, eps, accuracy, **more):
    return {
        "label": label,
        "paper": {"eps": eps_claimed, "accuracy": accuracy + 0.01},
        "claimed": claimed(eps_claimed, verdict).to_json(),
        "certified": certified(eps).to_json(),
        "audited": {
            "eps_lower": eps * 0.9,
            "unbounded": False,
            "delta": 5e-6,
            "confidence": 1.0,
            "trials": 0,
            "attack": "likelihood ratios",
        },
        "ours": {"metric": "accuracy", "values": [accuracy], "mean": accuracy, "spread": None},
        "seconds": 3.1,
        "note": "",
        "not_here": None,
        "extra": {"rounds": 60},
        **more,
    }


def paper(folder, name="flame"):
    """A paper with a table and a figure of many rows."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    rows = [
        row("SS-Simple", 1.2, Verdict.CLAIMED_HOLDS, 1.1, 0.51),
        row("SS-Double", 0.3, Verdict.CLAIMED_UNPROVEN, 1.8, 0.72, note="needs binary reports"),
        row("SS-Topk", 0.24, Verdict.CLAIMED_REFUTED, 0.93, 0.867, note=EVIL),
        {
            **row("NP-FL", 1.0, Verdict.CLAIMED_HOLDS, 1.0, 0.92),
            "claimed": None,
            "certified": no_guarantee(SCOPE, reason="no noise is added").to_json(),
            "audited": None,
            "ours": None,
            "not_here": "needs an accelerator",
        },
    ]
    x = [10.0, 100.0, 1000.0, 10000.0]
    drawn = Figure(
        title="eps against users",
        x_label="users",
        y_label="eps",
        log_x=True,
        log_y=True,
        lines=[
            Line(name="claimed", x=x, y=[1.0, 0.3, 0.1, 0.03], style="dashed"),
            Line(name="certified", x=x, y=[None, 1.2, 0.4, 0.12]),
            Line(name="audited", x=x, y=[1.5, 0.9, 0.3, 0.1], style="points"),
        ],
    )
    exhibits = {
        "headline": {"title": "Headline", "rows": rows, "figures": [], "notes": ["A note.", f"Another one {EVIL}."]},
        "fig4": {"title": "Figure 4: utility and privacy", "rows": rows * 5, "figures": [drawn.to_json()] * 2},
    }
    for key, exhibit in exhibits.items():
        caption = "What it shows, what the paper left open, what we chose."
        (target / f"{key}.json").write_text(json.dumps({"key": key, "caption": caption, "notes": [], **exhibit}))
    about = {
        "paper": name,
        "title": "FLAME: federated learning in the shuffle model",
        "citation": "FLAME (Liu et al., AAAI 2021)",
        "reference": "LiuCaoChenGuoYoshikawa21",
        "exhibits": ["headline", "fig4", "not-yet"],
        "quick": True,
        "seeds": 1,
        "seconds": 170.2,
        "version": "0.1",
        "machine": "2 cores, jax, cpu",
    }
    (target / "paper.json").write_text(json.dumps(about))
    return target


def index(folder):
    """Two papers and one that was not reproduced."""
    for name in ("flame", "apes"):
        paper(folder, name)
    (folder / "index.json").write_text(json.dumps({"papers": ["flame", "apes", "geyer"]}))
    return folder
