"""Loggers write what the statement covers (scores and eps by round, settings, statement), and close in any case."""

import sys
import types

import pytest
import tiny

from dovetail import experiment
from dovetail.experiment import config
from dovetail.statements import Bound
from dovetail.watching import MLflow, TensorBoard, WandB
from dovetail.watching.loggers import scores_by_name

CONFIG = {
    "task": {"name": "tiny:TASK"},
    "protocol": {"name": "dp_fl", "clip_norm": 1.0, "noise_multiplier": 20.0},
    "cohort": {"kind": "everyone", "rounds": 4},
    "diagnostics": True,
}
EPS = "privacy/eps_at_delta_1e-05"


def trained(logger, *, fail=False):
    class Fails(experiment.Callback):
        def on_round(self, progress):
            raise KeyboardInterrupt

    plan = experiment.prepare(config.parse(CONFIG), task=tiny.TASK)
    return experiment.run(plan, evaluate_every=2, callbacks=[logger, *([Fails()] if fail else [])])


class Recorder:
    """Stands for a library: notes every call, and answers with itself."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **settings):
            self.calls.append((name, args, settings))
            return self

        return call

    def said(self, name):
        return [(args, settings) for called, args, settings in self.calls if called == name]


def library(monkeypatch, name, **members):
    module = types.ModuleType(name)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("logger", "name", "extra"),
    [
        (lambda: TensorBoard("x"), "tensorboardX", "tensorboard"),
        (MLflow, "mlflow", "mlflow"),
        (WandB, "wandb", "wandb"),
    ],
)
def test_a_missing_library_is_one_sentence(monkeypatch, logger, name, extra):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {name}: pip install 'dovetail-fl\[{extra}\]'"):
        logger()


def test_scores_are_finite_numbers_and_eps_has_its_delta():
    metrics = {"loss": float("nan"), "accuracy": 0.5, "recall": [0.25, None, 1.0], "note": "text"}
    bound = Bound(eps=1.5, delta=1e-5, proof=None)
    progress = experiment.Progress(round=1, rounds=2, accuracy=0.5, spent=bound, metrics=metrics, fresh=True)
    assert scores_by_name(progress) == {"accuracy": 0.5, "recall/0": 0.25, "recall/2": 1.0, EPS: 1.5}


def test_tensorboard(monkeypatch, tmp_path):
    writer = Recorder()
    library(monkeypatch, "tensorboardX", SummaryWriter=lambda folder: writer)
    result = trained(TensorBoard(tmp_path))
    scalars = [args for args, _ in writer.said("add_scalar")]
    assert [step for name, _, step in scalars if name == "accuracy"] == [2, 4]
    spent = [value for name, value, _ in scalars if name == EPS]
    assert spent == sorted(spent)
    assert spent[-1] <= result.statement.eps
    texts = {args[0]: args[1] for args, _ in writer.said("add_text")}
    assert "protocol.noise_multiplier = 20.0" in texts["config"]
    assert "if the curator" in texts["privacy/statement"] or "  if " in texts["privacy/statement"]
    assert not any("variance" in str(call) for call in writer.calls), "diagnostics are not logged"
    assert writer.calls[-1][0] == "close"


def test_mlflow(monkeypatch):
    recorder = Recorder()
    library(monkeypatch, "mlflow", active_run=lambda: None, **{
        name: getattr(recorder, name)
        for name in ("set_experiment", "start_run", "log_params", "log_metrics", "set_tag", "log_text", "end_run")
    })  # fmt: skip
    result = trained(MLflow(experiment="private", name="first"))
    assert recorder.said("set_experiment") == [(("private",), {})]
    assert recorder.said("log_params")[0][0][0]["protocol.noise_multiplier"] == "20.0"
    assert [settings["step"] for _, settings in recorder.said("log_metrics")[:2]] == [2, 4]
    assert recorder.said("log_text") == [((str(result.statement), "statement.txt"), {})]
    assert recorder.calls[-1] == ("end_run", ("FINISHED",), {})
    with pytest.raises(KeyboardInterrupt):
        trained(MLflow(), fail=True)
    assert recorder.calls[-1] == ("end_run", ("KILLED",), {})
    library(monkeypatch, "mlflow", **{**sys.modules["mlflow"].__dict__, "active_run": lambda: "theirs"})
    before = len(recorder.said("start_run"))
    trained(MLflow())
    assert len(recorder.said("start_run")) == before, "an active run is used, and left open"
    assert recorder.calls[-1][0] == "log_text"


def test_wandb(monkeypatch):
    run, summary = Recorder(), {}
    run.summary = summary
    begun = []
    library(monkeypatch, "wandb", init=lambda **settings: begun.append(settings) or run)
    result = trained(WandB("private", mode="offline", dir="here"))
    assert (begun[0]["project"], begun[0]["mode"], begun[0]["dir"]) == ("private", "offline", "here")
    assert begun[0]["config"]["protocol"]["noise_multiplier"] == 20.0
    assert [settings["step"] for _, settings in run.said("log")] == [2, 4]
    assert summary["privacy/statement"] == str(result.statement)
    assert run.calls[-1] == ("finish", (), {"exit_code": 0})
    with pytest.raises(KeyboardInterrupt):
        trained(WandB(), fail=True)
    assert run.calls[-1] == ("finish", (), {"exit_code": 1})


def test_a_real_event_file(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    trained(TensorBoard(tmp_path))
    (file,) = tmp_path.glob("events.out.tfevents.*")
    data, events = file.read_bytes(), []
    while data:  # a record: its length in 8 bytes, 4 of a checksum, the event, 4 of a checksum
        size = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    tags = {value.tag for event in events for value in event.summary.value}
    assert {"accuracy", "loss", "final/accuracy"} <= tags
    assert any(tag.startswith("privacy/eps_at_delta") for tag in tags)


@pytest.mark.soak
def test_real_mlflow_and_wandb(tmp_path, monkeypatch):
    mlflow, _ = pytest.importorskip("mlflow"), pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    trained(MLflow(experiment="private"))
    (done,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("private").experiment_id])
    assert done.info.status == "FINISHED"
    assert "accuracy" in done.data.metrics
    trained(WandB(mode="offline", dir=str(tmp_path)))
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
