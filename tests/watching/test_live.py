"""The live page: complete at every moment, reloads until the end, and then says how it ended."""

import itertools

import pytest
import tiny

from dovetail import experiment
from dovetail.experiment import config
from dovetail.watching import LivePage

CONFIG = {
    "task": {"name": "tiny:TASK"},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0},
    "privacy": {"eps": 3.0, "delta": 1e-5},
    "cohort": {"kind": "everyone", "rounds": 6},
}
RELOADS = '<meta http-equiv="refresh"'


class Pages(experiment.Callback):
    """What somebody who looks after each round would see."""

    def __init__(self, page, *, fail_after=None):
        self.page, self.fail_after, self.seen = page, fail_after, []

    def on_start(self, start):
        self.seen.append(self.page.read_text())

    def on_round(self, progress):
        self.seen.append(self.page.read_text())
        if progress.round == self.fail_after:
            raise (KeyboardInterrupt if self.fail_after > 2 else ValueError)("<b>no</b>")


def watched(folder, **settings):
    clock = itertools.count(step=10.0)
    watching = Pages(folder / "live.html", fail_after=settings.pop("fail_after", None))
    plan = experiment.prepare(config.parse(CONFIG), task=tiny.TASK)
    page = LivePage(folder / "live.html", clock=lambda: next(clock))
    experiment.run(plan, out=folder, evaluate_every=2, callbacks=[page, watching], **settings)
    return watching.seen


def test_it_shows_scores_budget_and_time_while_it_runs(tmp_path):
    seen = watched(tmp_path / "run")
    assert len(seen) == 7
    assert all(RELOADS in page and "</html>" in page for page in seen)
    assert "0 of 6" in seen[0]
    assert "3 of 6" in seen[3]
    assert "accuracy" in seen[2]
    assert "(eps, delta) spent, replace-one" in seen[2]
    assert "left, about" in seen[3]
    assert "<svg" in seen[4]
    last = (tmp_path / "run" / "live.html").read_text()
    assert RELOADS not in last
    assert "(3, 1e-05)-DP" in last
    assert 'href="report.html"' in last
    for page in (*seen, last):
        assert "<script" not in page
        assert "http://" not in page.replace("http://www.w3.org", "")
        assert "https://" not in page


def test_it_says_that_it_was_interrupted_and_goes_on(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        watched(tmp_path / "run", fail_after=4, checkpoint_every=2)
    page = (tmp_path / "run" / "live.html").read_text()
    assert RELOADS not in page
    assert f"--resume --out {tmp_path / 'run'}" in page
    seen = watched(tmp_path / "run", resume=True)
    assert "4 of 6" in seen[0]
    assert "<svg" in seen[0], "what was before the checkpoint is shown again"


def test_an_error_is_text(tmp_path):
    with pytest.raises(ValueError, match="no"):
        watched(tmp_path / "run", fail_after=1)
    page = (tmp_path / "run" / "live.html").read_text()
    assert "&lt;b&gt;no" in page
    assert RELOADS not in page


def test_the_command(command, tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(
        '[task]\nname = "tiny:TASK"\n[cohort]\nkind = "everyone"\nrounds = 3\n'
        '[protocol]\nname = "dp_fl"\nclip_norm = 1.0\nnoise_multiplier = 20.0\n'
    )
    status, _, err = command("run", str(path), "--out", str(tmp_path / "run"), "--live")
    assert status == 0
    assert f"live page: {(tmp_path / 'run' / 'live.html').as_uri()}" in err
    assert RELOADS not in (tmp_path / "run" / "live.html").read_text()
