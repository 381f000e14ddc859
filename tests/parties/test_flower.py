"""Dovetail on Flower: what a node replies, what a server app passes on, and both in a fleet of real processes.

Run by `make flower`: they need flwr and, the last two, PyTorch and Linux namespaces.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common.serde import message_to_proto
from flwr.server import Server as OlderServer
from flwr.server import SimpleClientManager
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.supercore.task_identity import TaskIdentity
from parties import flower_fleet
from parties.household import files_under, opened
from parties.test_leaks import found

from dovetail.learners.server import Server
from dovetail.numbers import at_most
from dovetail.parties import fleet
from dovetail.parties.analyzer.learning import Learning
from dovetail.parties.analyzer.party import Analyzer
from dovetail.parties.common.guarantees import certify_task
from dovetail.parties.common.http_clients import Gone, Unreachable
from dovetail.parties.common.keys import KeyPair, KeyRing, ServicePairs
from dovetail.parties.common.ledger import Ledger
from dovetail.parties.common.measures import Measure, is_held_out
from dovetail.parties.common.notices import withdraw_task
from dovetail.parties.common.sealing import Unsealable, open_sealed
from dovetail.parties.common.task import TrainingTask, sign
from dovetail.parties.common.wire import (
    RoundStatus,
    TooLate,
    Upload,
    decode_vector,
    sign_status,
    signature_of,
    upload_path,
)
from dovetail.parties.flower import DovetailStrategy, LocalShuffler, Relay, dovetail_mod, mod, strategy
from dovetail.parties.flower.messages import envelope_in_reply, flatten, make_instruction, unflatten
from dovetail.parties.user.agent import serve_agent
from dovetail.parties.user.client import Client, Envelope, RoundCall
from dovetail.parties.user.policy import Policy
from dovetail.statements import Statement

pytestmark = pytest.mark.flower

SIGNER, ANALYZER = KeyPair.generate("sign"), KeyPair.generate("sign")
SHUFFLER = ServicePairs(sign=KeyPair.generate("sign"), seal=KeyPair.generate("seal"))
NODES, ROUNDS, EPS = 4, 3, 6.0
SECRET = "seventeen examples of Alice"


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """What Flower sets in the process of an app."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def analyzer_keys(tmp_path) -> KeyRing:
    ring = KeyRing(tmp_path / "keys", "seal")
    ring.add()
    ANALYZER.save(ring.folder / f"sign-{ANALYZER.public.key_id.hex()}.json")
    return ring


@pytest.fixture
def task(analyzer_keys) -> TrainingTask:
    return TrainingTask(
        name="four numbers",
        protocol="privunit",
        settings={"clip_norm": 1.0, "eps_local": EPS},
        dim=4,
        rounds=ROUNDS,
        min_clients=NODES,
        max_clients=NODES + 1,
        round_seconds=5.0,
        eps=ROUNDS * EPS,
        delta=1e-5,
        analyzer=analyzer_keys.current().public,
        analyzer_sign=ANALYZER.public,
        shufflers=(SHUFFLER.public,),
    )


def model_of(*numbers: float) -> ArrayRecord:
    values = np.array(numbers, np.float32)
    return ArrayRecord({"weight": Array(values[:3].reshape(3, 1)), "bias": Array(values[3:])})


def policy_of(task: TrainingTask, **changed) -> Policy:
    asked = {
        "signer": SIGNER.public.key_id,
        "analyzer": task.analyzer_id,
        "min_clients": NODES,
        "eps_round": EPS,
        "eps_task": ROUNDS * EPS,
        "eps_lifetime": ROUNDS * EPS,
        "delta_lifetime": 1e-4,
        "shufflers": (SHUFFLER.public.key_id,),
    }
    return Policy(**{**asked, **changed})


@pytest.fixture
def simulated(tmp_path, task, monkeypatch):
    """The configuration of a run in a simulation."""
    monkeypatch.setattr(mod, "_is_simulated", lambda: True)
    folder = tmp_path / "simulation"
    folder.mkdir()
    (folder / "policy.json").write_bytes(msgspec.json.encode(policy_of(task)))
    return {"dovetail-simulation": str(folder)}


def context_of(run_config, node: int = 0, **node_config) -> Context:
    told = {"partition-id": node, "num-partitions": NODES, **node_config}
    return Context(run_id=1, node_id=100 + node, node_config=told, state=RecordDict(), run_config=run_config)


def call_to(task: TrainingTask, round: int = 1, by: KeyPair = ANALYZER, **status) -> RoundCall:
    told = {"over": False, "head": bytes(32), "closes": int(time.time()) + 60, **status}
    signed = sign_status(RoundStatus(task_id=task.task_id, round=round, **told), by)
    return RoundCall(signed=sign(task, SIGNER), status=signed)


def asked(task: TrainingTask, round: int = 1, kind: str = "train", **call) -> Message:
    content = make_instruction(model_of(1, 2, 3, 4), ConfigRecord(), call_to(task, round, **call))
    return Message(content, 100, kind)


def trained(message: Message, context: Context) -> Message:
    """Training code that tells more than its model."""
    before = message.content["arrays"]
    moved = {name: Array(values.numpy() + np.float32(0.25)) for name, values in before.items()}
    more = {"metrics": MetricRecord({"num-examples": 17}), "config": ConfigRecord({"who": SECRET})}
    return Message(RecordDict({"arrays": ArrayRecord(moved), **more}), reply_to=message)


def never(message: Message, context: Context) -> Message:
    raise AssertionError("the training code was called")


class Remembers:
    """In the place of an agent: what it is handed."""

    def __init__(self, *_: object) -> None:
        self.updates: list[np.ndarray] = []
        self.facts: list[dict[str, float]] = []

    def answer(self, call, update, facts) -> Envelope:
        self.updates.append(update)
        self.facts.append(facts)
        return Envelope(task_id=bytes(32), round=call.status.round, sender=bytes(16), uploads=(), signatures=())


def test_nobody_else_imports_flwr():
    package = Path(mod.__file__).parents[2]
    importers = {
        path.parent for path in package.rglob("*.py") if re.search(r"^\s*(from|import) flwr", path.read_text(), re.M)
    }
    assert importers == {package / "parties" / "flower"}


# --- records


def test_a_model_is_one_vector_and_back_with_its_names_shapes_and_types():
    model = ArrayRecord({"a": Array(np.ones((2, 3), np.float64)), "b": Array(np.zeros((), np.float16))})
    vector = flatten(model)
    assert vector.dtype == np.float32 and vector.tolist() == [1, 1, 1, 1, 1, 1, 0]
    back = unflatten(np.arange(7, dtype=np.float32), model)
    assert list(back) == ["a", "b"]
    assert back["a"].numpy().dtype == np.float64 and back["a"].numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert back["b"].numpy().dtype == np.float16 and back["b"].numpy() == 6
    with pytest.raises(ValueError, match="the task is for a model of 8 numbers, and these arrays have 7"):
        unflatten(np.zeros(8, np.float32), model)


def test_counters_of_integers_are_no_model():
    with pytest.raises(ValueError, match="the array 'seen' holds int64"):
        flatten(ArrayRecord({"seen": Array(np.array([3]))}))


# --- the mod


def test_a_reply_holds_the_envelope_and_nothing_that_the_training_code_said(task, simulated):
    reply = dovetail_mod(asked(task), context_of(simulated), trained)
    assert list(reply.content) == ["dovetail"] and list(reply.content["dovetail"]) == ["envelope"]
    envelope = envelope_in_reply(reply)
    assert (envelope.task_id, envelope.round, len(envelope.uploads)) == (task.task_id, 1, 1)
    assert SECRET not in repr(reply) and "num-examples" not in repr(reply)


def test_the_update_is_the_difference_also_if_the_model_is_changed_in_place(task, monkeypatch):
    agent = Remembers()
    monkeypatch.setattr(mod, "Agent", lambda socket: agent)
    context = context_of({}, **{"dovetail-agent": "/run/agent"})

    def in_place(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"]
        arrays["bias"] = Array(np.array([10], np.float32))
        return Message(RecordDict({"any name": arrays}), reply_to=message)

    dovetail_mod(asked(task), context, trained)
    dovetail_mod(asked(task), context, in_place)
    assert agent.updates[0].tolist() == [0.25] * 4
    assert agent.updates[1].tolist() == [0, 0, 0, 6]


@pytest.mark.parametrize("kind", ["query", "query.some", "system"])
def test_nothing_but_training_and_evaluating_is_answered(task, simulated, kind):
    reply = dovetail_mod(asked(task, kind=kind), context_of(simulated), never)
    assert reply.error.reason == "this node answers messages to train and to evaluate alone"


class ListClient(NumPyClient):
    """An app of Flower's older kind, which knows neither messages nor names of arrays."""

    def fit(self, parameters, config):
        assert config == {"epochs": 2}
        return [values + np.float32(0.25) for values in parameters], 17, {"who": SECRET}

    def evaluate(self, parameters, config):
        return float(parameters[1].sum()), 17, {"accuracy": 0.75, "who": SECRET}


def asked_with_config(task: TrainingTask, round: int = 1, kind: str = "train") -> Message:
    content = make_instruction(model_of(1, 2, 3, 4), ConfigRecord({"epochs": 2}), call_to(task, round))
    return Message(content, 100, kind)


@pytest.mark.parametrize("made", [ListClient, lambda: ListClient().to_client()], ids=["NumPyClient", "Client"])
def test_an_app_of_a_client_fn_trains_and_evaluates_as_it_stands(task, monkeypatch, made):
    """Today's KeyError on every node: 'fitins.parameters'."""
    agent, built = Remembers(), []
    monkeypatch.setattr(mod, "Agent", lambda socket: agent)
    context = context_of({}, **{"dovetail-agent": "/run/agent"})

    def client_fn(context: Context):
        built.append(context)
        return made()

    app = ClientApp(client_fn=client_fn, mods=[dovetail_mod])
    for round in (1, 2):
        reply = app(asked_with_config(task, round), context)
        assert list(reply.content) == ["dovetail"] and SECRET not in repr(reply)
        assert agent.updates[-1].tolist() == [0.25] * 4 and agent.facts[-1] == {}
    assert len(built) == 3  # the first time it is tried as an app of messages, and then no more
    assert repr(app(asked_with_config(task, 3, "evaluate"), context).content["dovetail"]) == "{'evaluated': True}"
    app(asked_with_config(task, 3), context)
    assert agent.facts[-1] == {"loss": 4.0, "accuracy": 0.75, "num_examples": 17.0}
    context.run_id = 2  # of another app, written for messages; the node's state is as it was
    app = app_of_messages()
    assert not app(asked_with_config(task, 4), context).has_error() and len(built) == 5


def test_a_client_without_an_evaluation_or_a_fit_of_its_own_is_refused(task, simulated):
    class Silent(NumPyClient):
        def fit(self, parameters, config):
            return parameters[:1], 1, {}  # another model

    app = ClientApp(client_fn=lambda context: Silent().to_client(), mods=[dovetail_mod])
    said = [app(asked(task, kind=kind), context_of(simulated)).error.reason for kind in ("evaluate", "train")]
    assert said == [
        f"{doing} failed on this node; the error stays in its own log" for doing in ("evaluation", "training")
    ]
    assert not list(Path(simulated["dovetail-simulation"]).rglob("task-*.db"))


def app_of_messages(train=trained, **metrics: float) -> ClientApp:
    app = ClientApp(mods=[dovetail_mod])
    app.train()(train)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        more = {"metrics": MetricRecord(metrics), "config": ConfigRecord({"who": SECRET})}
        return Message(RecordDict(more), reply_to=message)

    return app


def test_what_a_node_finds_stays_there_and_goes_into_the_report_of_its_round_alone(task, monkeypatch):
    agent = Remembers()
    monkeypatch.setattr(mod, "Agent", lambda socket: agent)
    context = context_of({}, **{"dovetail-agent": "/run/agent"})
    app = app_of_messages(eval_loss=2.5, eval_acc=0.5)
    reply = app(asked(task, kind="evaluate"), context)
    assert list(reply.content) == ["dovetail"] and list(reply.content["dovetail"]) == ["evaluated"]
    assert SECRET not in repr(reply) and "0.5" not in repr(reply)
    for round in (1, 2):
        app(asked(task, round), context)
    assert agent.facts == [{"eval_loss": 2.5, "eval_acc": 0.5, "loss": 2.5, "accuracy": 0.5}, {}]


@pytest.mark.parametrize("evaluate", ["raises", "says_why_not"])
def test_the_words_of_an_evaluation_that_fails_stay_on_the_node(task, simulated, evaluate):
    reply = dovetail_mod(asked(task, kind="evaluate"), context_of(simulated), globals()[evaluate])
    assert reply.error.reason == "evaluation failed on this node; the error stays in its own log"
    assert SECRET not in repr(reply)


def raises(*arguments: object) -> Message:
    raise KeyError(SECRET)


def says_why_not(message: Message, context: Context) -> Message:
    return Message(Error(code=0, reason=SECRET), reply_to=message)


def other_names(message: Message, context: Context) -> Message:
    return Message(RecordDict({"arrays": ArrayRecord({SECRET: Array(np.zeros(4, np.float32))})}), reply_to=message)


def other_shapes(message: Message, context: Context) -> Message:
    arrays = {"weight": Array(np.zeros((0, 1), np.float32)), "bias": Array(np.ones(1, np.float32))}  # one number
    return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)


@pytest.mark.parametrize("train", [raises, says_why_not, other_names, other_shapes])
def test_the_words_of_an_error_stay_on_the_node(task, simulated, train):
    reply = dovetail_mod(asked(task), context_of(simulated), train)
    assert reply.error.reason == "training failed on this node; the error stays in its own log"
    assert SECRET not in repr(reply)


@pytest.mark.parametrize(
    "changed",
    [{"analyzer": bytes(8)}, {"signer": bytes(8)}, {"min_clients": NODES + 1}, {"shufflers": (bytes(16),)}],
)
def test_a_task_that_the_nodes_own_policy_does_not_admit_is_refused(task, simulated, changed, caplog):
    policy = policy_of(task, **changed)
    Path(simulated["dovetail-simulation"], "policy.json").write_bytes(msgspec.json.encode(policy))
    reply = dovetail_mod(asked(task), context_of(simulated), trained)
    assert reply.error.reason == "this node refuses the round; its own log says why"
    assert not list(Path(simulated["dovetail-simulation"]).rglob("task-*.db"))


@pytest.mark.parametrize(
    "forged",
    [
        {"by": SIGNER},  # any key but the analyzer's
        {"over": True},
        {"closes": 1},
        {"round": 20, "by": SHUFFLER.sign},
    ],
)
def test_a_relay_makes_no_node_spend_on_a_round_that_the_analyzer_did_not_open(task, simulated, forged):
    """A relay burned a task's budget, or ended a node's task with a false round 20."""
    reply = dovetail_mod(asked(task, **forged), context_of(simulated), trained)
    assert reply.error.reason == "this node refuses the round; its own log says why"
    assert not list(Path(simulated["dovetail-simulation"]).rglob("task-*.db"))
    assert not dovetail_mod(asked(task), context_of(simulated), trained).has_error()


def test_a_node_hears_of_a_withdrawal_before_it_spends_and_remembers_it(task, simulated):
    withdrawal = (withdraw_task(SIGNER, task.task_id),)
    call = msgspec.structs.replace(call_to(task), notices=withdrawal)
    ended = Message(make_instruction(model_of(1, 2, 3, 4), ConfigRecord(), call), 100, "train")
    for message in (ended, asked(task)):
        assert dovetail_mod(message, context_of(simulated), trained).has_error()
    assert not list(Path(simulated["dovetail-simulation"]).rglob("task-*.db"))


def test_a_virtual_node_has_a_policy_of_its_own_or_that_of_all(task, simulated):
    own = Path(simulated["dovetail-simulation"], "node-1")
    own.mkdir()
    (own / "policy.json").write_bytes(msgspec.json.encode(policy_of(task, min_clients=NODES + 1)))
    replies = [dovetail_mod(asked(task), context_of(simulated, node), trained) for node in (0, 1)]
    assert not replies[0].has_error()
    assert replies[1].error.reason == "this node refuses the round; its own log says why"


def test_the_same_round_again_gives_the_same_envelope_and_another_one_costs_more(task, simulated):
    first, again, next_ = (
        dovetail_mod(asked(task, round), context_of(simulated), trained).content["dovetail"]["envelope"]
        for round in (1, 1, 2)
    )
    assert first == again != next_


def test_a_real_node_never_takes_its_policy_from_a_run(task, simulated, monkeypatch):
    monkeypatch.setattr(mod, "_is_simulated", lambda: False)
    reply = dovetail_mod(asked(task), context_of(simulated), never)
    assert reply.error.reason == "this node cannot train this task or this model; its own log says why"


def test_the_agent_of_the_nodes_configuration_goes_first(task, simulated, monkeypatch):
    asked_for = []
    monkeypatch.setattr(mod, "Agent", lambda socket: asked_for.append(str(socket)) or Remembers())
    dovetail_mod(asked(task), context_of(simulated, **{"dovetail-agent": "/run/agent"}), trained)
    assert asked_for == ["/run/agent"]


def test_a_process_of_ray_is_a_simulation_and_no_other(monkeypatch):
    for ray, there in ((None, False), (SimpleNamespace(is_initialized=lambda: False), False)):
        monkeypatch.setitem(sys.modules, "ray", ray)
        assert mod._is_simulated() is there
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    assert mod._is_simulated()


def test_whatever_goes_wrong_with_the_report_stays_on_the_node(task, simulated, monkeypatch):
    monkeypatch.setattr(Client, "answer", raises)
    reply = dovetail_mod(asked(task), context_of(simulated), trained)
    assert reply.error.reason == "this node's agent did not answer"
    Path(simulated["dovetail-simulation"], "policy.json").unlink()
    reply = dovetail_mod(asked(task), context_of(simulated), never)
    assert reply.error.reason == "this node cannot train this task or this model; its own log says why"


def test_a_message_without_a_task_is_refused_before_training(task, simulated):
    strange = Message(RecordDict({"arrays": model_of(1, 2, 3, 4), "config": ConfigRecord()}), 100, "train")
    assert dovetail_mod(strange, context_of(simulated), never).has_error()
    garbled = asked(task)
    garbled.content["dovetail"]["call"] = b"{}"
    assert dovetail_mod(garbled, context_of(simulated), never).has_error()


def test_the_agent_of_a_node_reports_over_its_socket(task, tmp_path):
    socket = tmp_path / "agent.sock"
    client = Client(tmp_path / "node", policy=policy_of(task), key=KeyPair.generate("sign"))
    threading.Thread(target=serve_agent, args=(client, socket), daemon=True).start()
    flower_fleet.wait_until(socket.exists, "the agent")
    context = context_of({}, **{"dovetail-agent": str(socket)})
    assert envelope_in_reply(dovetail_mod(asked(task), context, trained)).task_id == task.task_id
    unpinned = msgspec.structs.replace(task, analyzer=KeyPair.generate("seal").public)
    refused = dovetail_mod(asked(unpinned), context, trained)
    assert refused.error.reason == "this node refuses the round; its own log says why"
    nobody = context_of({}, **{"dovetail-agent": str(tmp_path / "none.sock")})
    assert dovetail_mod(asked(task), nobody, trained).error.reason.startswith("this node's agent did not answer")


# --- the strategy


@contextlib.contextmanager
def gone() -> Iterator[None]:
    """Status 410, to a link."""
    try:
        yield
    except TooLate as error:
        raise Gone(str(error)) from error


class Direct:
    """The analyzer without HTTP between."""

    def __init__(self, analyzer: Analyzer) -> None:
        self.analyzer = analyzer

    def task(self):
        return self.analyzer.signed

    def notices(self):
        return []

    def status(self):
        return self.analyzer.status()

    def privacy(self):
        return self.analyzer.privacy()

    def model(self, round: int, *, dim: int = 4) -> np.ndarray:
        return decode_vector(self.analyzer.model(round), dim)

    def send_part(self, round: int, batch: bytes, number: int, part: bytes) -> None:
        with gone():
            self.analyzer.count_part(0, round, batch, number, part)

    def report_closed(self, round: int, closed) -> None:
        with gone():
            self.analyzer.note_closed(0, round, closed)


@pytest.fixture
def analyzer(tmp_path, task, analyzer_keys) -> Iterator[Analyzer]:
    learning = Learning(initial=np.zeros(4, np.float32), server=Server())
    made = Analyzer(
        tmp_path / "analyzer",
        signed=sign(task, SIGNER),
        signer=SIGNER.public.key_id,
        keys=analyzer_keys,
        learning=learning,
        workers=1,
    )
    yield made
    made.close()


def play(analyzer: Analyzer, folder: Path) -> LocalShuffler:
    return LocalShuffler(folder / "shuffler", analyzer=Direct(analyzer), signer=SIGNER.public.key_id, keys=SHUFFLER)  # type: ignore[arg-type]


class Nodes(Grid):
    """A grid of virtual nodes in this process."""

    def __init__(self, run_config, count: int, train=trained) -> None:
        self.nodes, self.run_config, self.train = list(range(100, 100 + count)), run_config, train
        self.sent: list[list[Message]] = []
        self.contexts: dict[int, Context] = {}
        self.tamper = lambda replies: replies

    def get_node_ids(self):
        return self.nodes

    def send_and_receive(self, messages, *, timeout=None):
        self.sent.append(list(messages))
        assert timeout is not None
        replies = []
        for message in self.sent[-1]:
            node = message.metadata.dst_node_id
            context = self.contexts.setdefault(node, context_of(self.run_config, node - 100))
            app = self.train if isinstance(self.train, ClientApp) else None
            replies.append(app(message, context) if app else dovetail_mod(message, context, self.train))
        return self.tamper(replies)

    def set_run(self, run):
        raise NotImplementedError

    run = create_message = push_messages = pull_messages = property(set_run)  # type: ignore[assignment]


def outcomes(analyzer: Analyzer) -> list[str]:
    return [one["outcome"] for one in analyzer.privacy()["history"]]


def test_a_whole_training_over_a_grid(task, simulated, analyzer, tmp_path):
    grid, measured = Nodes(simulated, NODES), []

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        measured.append((round, float(flatten(arrays).sum())))
        return MetricRecord({"sum": measured[-1][1]})

    result = DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id).start(
        grid, model_of(9, 9, 9, 9), train_config=ConfigRecord({"epochs": 2}), evaluate_fn=evaluate
    )
    assert outcomes(analyzer) == ["released"] * ROUNDS
    assert [entry.round for entry in analyzer.ledger.entries if entry.kind == "release"] == [1, 2, 3]
    assert [round for round, _ in measured] == [0, 1, 2, 3]
    assert measured[0][1] == 0  # the analyzer's model, not the server app's
    assert np.allclose(flatten(result.arrays), Direct(analyzer).model(3)) and np.any(flatten(result.arrays))
    assert result.evaluate_metrics_serverapp[3]["sum"] == measured[-1][1]
    for round, messages in enumerate(grid.sent, 1):
        assert len(messages) == NODES
        assert all(0 < message.metadata.ttl <= task.round_seconds for message in messages)
        assert all(message.metadata.group_id == str(round) for message in messages)
        assert messages[0].content["config"]["epochs"] == 2
    nodes = sorted(path.name for path in Path(simulated["dovetail-simulation"]).glob("node-*"))
    assert nodes == [f"node-{i}" for i in range(NODES)]


def test_no_more_nodes_are_asked_than_the_task_lets_in(simulated, analyzer, tmp_path):
    grid = Nodes(simulated, NODES + 3)
    DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id).start(grid, model_of(0, 0, 0, 0))
    assert {len(messages) for messages in grid.sent} == {NODES + 1}


def test_a_round_with_fewer_nodes_than_accounted_is_refused_and_nothing_is_sent(
    simulated, analyzer, tmp_path, monkeypatch
):
    monkeypatch.setattr(strategy, "_GATHERING", 0.02)
    grid = Nodes(simulated, NODES - 1)
    with pytest.raises(ValueError, match=f"round 1 needs at least {NODES} nodes, and only {NODES - 1} are connected"):
        DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id).start(grid, model_of(0, 0, 0, 0))
    assert grid.sent == [] and outcomes(analyzer) == []


def test_nodes_that_come_late_are_waited_for(simulated, analyzer, tmp_path, monkeypatch):
    monkeypatch.setattr(strategy, "_POLL", 0.02)
    grid = Nodes(simulated, NODES - 1)
    threading.Timer(0.3, lambda: grid.nodes.append(100 + NODES - 1)).start()
    DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id).start(grid, model_of(0, 0, 0, 0))
    assert outcomes(analyzer) == ["released"] * ROUNDS


def test_too_few_replies_make_a_void_round_and_nothing_leaves(simulated, analyzer, tmp_path):
    grid = Nodes(simulated, NODES)
    grid.tamper = lambda replies: replies[1:] if len(grid.sent) == 2 else replies
    DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id).start(grid, model_of(0, 0, 0, 0))
    assert outcomes(analyzer) == ["released", "void", "released"]
    assert np.array_equal(Direct(analyzer).model(1), Direct(analyzer).model(2))


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What a run logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    strategy._LOG.addHandler(handler)
    yield lines
    strategy._LOG.removeHandler(handler)


def test_a_run_ends_with_the_statement_of_the_analyzer(simulated, analyzer, tmp_path, said):
    grid = Nodes(simulated, NODES)
    DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id).start(grid, model_of(0, 0, 0, 0))
    facts = analyzer.privacy()
    expected = str(Statement.from_json(facts["statement"])).splitlines()
    assert said[-len(expected) :] == expected and f"{ROUNDS} rounds" in " ".join(expected)
    (spent,) = (line for line in said if "as the analyzer says" in line)
    assert f"it spent eps {at_most(facts['spent']['eps'])}" in spent
    assert any(line.startswith("nodes only train: the task has no measure") for line in said)


def test_a_relay_that_does_not_reach_the_analyzer_ends_with_the_statement_of_the_task(analyzer, tmp_path, said):
    relayed = play(analyzer, tmp_path)
    relayed.analyzer = None
    result = Result()
    DovetailStrategy(relayed, signer=SIGNER.public.key_id)._report_privacy(2, result)
    assert said[0] == "what the signed task guarantees for its 2 rounds:"
    assert "\n".join(said[1:]) == str(certify_task(analyzer.task, 2)[0])


@pytest.mark.parametrize("train", [raises, says_why_not])
def test_a_round_in_which_every_node_fails_stops_the_run_at_once_and_costs_nothing(
    simulated, analyzer, tmp_path, train
):
    """Each round waited for its whole time, and two without a report reserved 23.4 of eps 30."""
    grid, begun = Nodes(simulated, NODES, train), time.monotonic()
    shuffler = play(analyzer, tmp_path)
    one_round = analyzer.ledger.total[0]
    with pytest.raises(
        ValueError, match=f"no report came in round 1.*{NODES} of them say: training failed on this node"
    ):
        DovetailStrategy(shuffler, signer=SIGNER.public.key_id).start(grid, model_of(0, 0, 0, 0))
    assert time.monotonic() - begun < 4.0 and len(grid.sent) == 1
    assert outcomes(analyzer) == ["void"] and analyzer.privacy()["rounds_unused"] == 1
    assert analyzer.ledger.total[0] == one_round
    assert not list(Path(simulated["dovetail-simulation"]).rglob("task-*.db"))  # no node has spent anything
    grid.train = trained
    DovetailStrategy(shuffler, signer=SIGNER.public.key_id).start(grid, model_of(0, 0, 0, 0))
    assert outcomes(analyzer) == ["void", "released", "released"]
    assert analyzer.ledger.total[0] == certify_task(analyzer.task, ROUNDS - 1)[0].eps


def test_nodes_whose_replies_are_lost_have_spent_and_the_analyzer_has_not(simulated, analyzer, tmp_path):
    """A node that has made its report cannot know that it did not arrive."""
    grid = Nodes(simulated, NODES)
    grid.tamper = lambda replies: []
    with pytest.raises(
        ValueError, match=f"no report came in round 1.*{NODES} nodes were asked, and none of them replied"
    ):
        DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id).start(grid, model_of(0, 0, 0, 0))
    assert analyzer.privacy()["rounds_unused"] == 1
    for ledger in Path(simulated["dovetail-simulation"]).rglob("task-*.db"):
        with contextlib.closing(Ledger.reopen(ledger)) as opened_ledger:
            assert opened_ledger.reserved_rounds == [1]


def test_a_server_app_of_the_older_kind_is_told_what_to_write(analyzer, tmp_path):
    made = DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id)
    with pytest.raises(ValueError, match=r"not in ServerAppComponents: write @app.main\(\)"):
        OlderServer(client_manager=SimpleClientManager(), strategy=made).fit(num_rounds=1, timeout=None)  # type: ignore[arg-type]
    assert outcomes(analyzer) == []


def test_an_app_without_the_mod_stops_the_run_with_a_question(simulated, analyzer, tmp_path):
    grid = Nodes(simulated, NODES)
    grid.tamper = lambda replies: [
        trained(message, context_of(simulated))
        for message in grid.sent[-1]  # what such an app would reply
    ]
    with pytest.raises(ValueError, match="is dovetail_mod the first of the app's mods"):
        DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id).start(grid, model_of(0, 0, 0, 0))


def test_a_configuration_of_evaluation_without_a_measure_is_refused(simulated, analyzer, tmp_path):
    grid = Nodes(simulated, NODES)
    with pytest.raises(ValueError, match="what they find would leave without protection"):
        DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id).start(
            grid, model_of(0, 0, 0, 0), evaluate_config=ConfigRecord({"batch": 8})
        )
    assert grid.sent == []


def with_weights(reply: Message) -> Message:
    reply.content["arrays"] = model_of(1, 1, 1, 1)
    return reply


def of_another_round(reply: Message) -> Message:
    envelope = msgspec.structs.replace(envelope_in_reply(reply), round=2)
    reply.content["dovetail"]["envelope"] = envelope.encode()
    return reply


def of_another_task(reply: Message) -> Message:
    envelope = msgspec.structs.replace(envelope_in_reply(reply), task_id=bytes(32))
    reply.content["dovetail"]["envelope"] = envelope.encode()
    return reply


def garbage(reply: Message) -> Message:
    reply.content["dovetail"]["envelope"] = b"\xc1\x00"
    return reply


def in_words(reply: Message) -> Message:
    reply.content["dovetail"]["envelope"] = "words"
    return reply


def cut(reply: Message) -> Message:
    envelope = envelope_in_reply(reply)
    short = Upload(envelope.uploads[0].report, envelope.uploads[0].sealed[:-1])
    reply.content["dovetail"]["envelope"] = msgspec.structs.replace(envelope, uploads=(short,)).encode()
    return reply


def under_another_name(reply: Message) -> Message:
    envelope = msgspec.structs.replace(envelope_in_reply(reply), sender=bytes(16))
    reply.content["dovetail"]["envelope"] = envelope.encode()
    return reply


def under_another_id(reply: Message) -> Message:
    envelope = envelope_in_reply(reply)
    other = Upload(bytes(16), envelope.uploads[0].sealed)
    reply.content["dovetail"]["envelope"] = msgspec.structs.replace(envelope, uploads=(other,)).encode()
    return reply


@pytest.mark.parametrize(
    "tampered",
    [
        with_weights,
        of_another_round,
        of_another_task,
        garbage,
        in_words,
        cut,
        under_another_name,
        under_another_id,
    ],
)
def test_a_reply_that_is_no_envelope_of_this_round_is_not_passed_on(simulated, analyzer, tmp_path, tampered, caplog):
    grid = Nodes(simulated, NODES + 1)
    grid.tamper = lambda replies: [*replies[1:], tampered(replies[0])] if len(grid.sent) == 1 else replies
    strategy_ = DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id)
    strategy_._run_round(grid, analyzer.status(), model_of(0, 0, 0, 0), ConfigRecord())
    assert analyzer.privacy()["history"][0]["uploads"] == NODES


def test_a_node_counts_once_in_a_round(simulated, analyzer, tmp_path):
    """The reply of one node twice, and an envelope of its own making beside it: the minimum is not reached."""
    grid = Nodes(simulated, NODES)

    def twice(replies: list[Message]) -> list[Message]:
        envelope = envelope_in_reply(replies[1])
        replies[1].metadata.__dict__["_src_node_id"] = replies[0].metadata.src_node_id
        assert envelope != envelope_in_reply(replies[0])
        return [*replies, replies[0]]

    grid.tamper = twice
    strategy_ = DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id)
    strategy_._run_round(grid, analyzer.status(), model_of(0, 0, 0, 0), ConfigRecord())
    assert outcomes(analyzer) == ["void"]


def test_a_node_that_sends_anothers_envelope_counts_nothing_twice(simulated, analyzer, tmp_path):
    grid = Nodes(simulated, NODES + 1)

    def copied(replies: list[Message]) -> list[Message]:
        replies[0].content["dovetail"]["envelope"] = replies[1].content["dovetail"]["envelope"]
        return replies

    grid.tamper = copied
    strategy_ = DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id)
    strategy_._run_round(grid, analyzer.status(), model_of(0, 0, 0, 0), ConfigRecord())
    assert analyzer.privacy()["history"][0]["uploads"] == NODES


@pytest.mark.parametrize("step", ["begin", "take", "freeze", "close"])
def test_a_server_app_that_was_ended_goes_on_where_it_was(simulated, analyzer, tmp_path, step, monkeypatch):
    class KilledError(Exception):
        pass

    first, grid = play(analyzer, tmp_path), Nodes(simulated, NODES)
    target = {"begin": first._shuffler.store, "take": first, "freeze": first._shuffler, "close": first._shuffler}[step]
    name = {"begin": "open_round", "take": "deliver", "freeze": "close_round", "close": "forward"}[step]
    monkeypatch.setattr(target, name, lambda *_, **__: (_ for _ in ()).throw(KilledError()))
    with pytest.raises(KilledError):
        DovetailStrategy(first, signer=SIGNER.public.key_id).start(grid, model_of(0, 0, 0, 0))
    first._shuffler.close()
    DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id).start(grid, model_of(0, 0, 0, 0))
    assert outcomes(analyzer) == ["released"] * ROUNDS


def test_a_round_that_the_analyzer_gave_up_is_forgotten(task, simulated, analyzer, tmp_path):
    first = play(analyzer, tmp_path)
    first.begin_round(analyzer.status(), 60.0)
    for node in range(NODES):
        first.deliver(node, envelope_in_reply(dovetail_mod(asked(task), context_of(simulated, node), trained)))
    first._shuffler.close()
    analyzer.give_up_round(1)
    second = play(analyzer, tmp_path)
    assert second._shuffler.store.pending_rounds() == []
    upload = envelope_in_reply(dovetail_mod(asked(task), context_of(simulated), trained)).uploads[0]
    key = KeyPair.load(Path(simulated["dovetail-simulation"], "node-0", "key.json"))
    message = opened(task, upload, SHUFFLER, key)[4:]
    assert len(message) == task.message_bytes
    assert message not in (tmp_path / "shuffler" / "store.db").read_bytes()


def test_an_analyzer_that_is_away_for_a_moment_is_asked_again(simulated, analyzer, tmp_path, monkeypatch):
    play_, failures = play(analyzer, tmp_path), [Unreachable("away")] * 2
    forward = play_._shuffler.forward

    def sometimes(*arguments: object) -> None:
        if failures:
            raise failures.pop()
        forward(*arguments)

    monkeypatch.setattr(play_._shuffler, "forward", sometimes)
    monkeypatch.setattr(strategy.time, "sleep", lambda seconds: None)
    DovetailStrategy(play_, signer=SIGNER.public.key_id).start(Nodes(simulated, NODES), model_of(0, 0, 0, 0))
    assert not failures and outcomes(analyzer) == ["released"] * ROUNDS


def test_an_analyzer_that_never_ends_a_round_is_noticed(analyzer, tmp_path, monkeypatch):
    monkeypatch.setattr(strategy, "_LONGEST_END", -4.9)
    monkeypatch.setattr(strategy, "_POLL", 0.02)
    made = DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id)
    with pytest.raises(TimeoutError, match="the analyzer has not ended round 1 in time"):
        made._wait_for_end_of(1)


def test_a_model_of_another_size_and_a_task_of_another_signer_are_refused(analyzer, tmp_path):
    made = DovetailStrategy(play(analyzer, tmp_path), signer=SIGNER.public.key_id)
    with pytest.raises(ValueError, match="the task is for a model of 4 numbers, and this one has 1"):
        made.start(Nodes({}, NODES), ArrayRecord({"w": Array(np.zeros(1, np.float32))}))
    with pytest.raises(ValueError, match="expected a task signed by 00"):
        DovetailStrategy(play(analyzer, tmp_path / "another"), signer=bytes(8))


def test_a_configuration_that_names_nobody_is_refused():
    with pytest.raises(
        ValueError, match="must have dovetail-services, or both dovetail-analyzer and dovetail-shuffler"
    ):
        DovetailStrategy.from_config({"dovetail-signer": "00" * 8, "dovetail-shuffler": ""})


def test_a_server_app_plays_with_the_key_that_the_task_names(task, tmp_path, monkeypatch):
    folder = tmp_path / "shuffler" / "keys"
    named, _ = ServicePairs.add(folder, days=30), ServicePairs.add(folder, days=365)
    signed = sign(msgspec.structs.replace(task, shufflers=(named.public,)), SIGNER)

    class Link:
        def __init__(self, url, *, ca=None, key=None) -> None:
            self.key = key

        def task(self):
            return signed

        def status(self):
            return SimpleNamespace(round=1)

        def close(self) -> None:
            pass

    monkeypatch.setattr(strategy, "AnalyzerClient", Link)
    config = {"dovetail-signer": SIGNER.public.key_id.hex(), "dovetail-analyzer": "https://analyzer"}
    made = DovetailStrategy.from_config({**config, "dovetail-shuffler": str(tmp_path / "shuffler")})
    for count in (0, 2):  # aggregators, or several shufflers: the server app can only relay
        with monkeypatch.context() as patch:
            patch.setattr(strategy, "verify", lambda *_, n=count, **__: SimpleNamespace(shufflers=(named.public,) * n))
            with pytest.raises(ValueError, match=f"the task has {count} shufflers, and a server app can be one alone"):
                DovetailStrategy.from_config({**config, "dovetail-shuffler": str(tmp_path / "shuffler")})
    assert made._source.key == named.sign
    assert made._delivery._shuffler.key == named.sign


# --- the relay


@pytest.fixture
def services(monkeypatch) -> list[tuple[str, int, Upload, bytes, bytes]]:
    """What services were given: address, round, upload, whose it is, and its signature."""
    given: list[tuple[str, int, Upload, bytes, bytes]] = []

    class Link:
        def __init__(self, url, *, index=0, ca=None) -> None:  # no key: what is given is signed already
            self.url = f"{url}/{index}"

        def upload(self, task_id: bytes, round: int, upload: Upload, *, sender: bytes, signature: bytes) -> None:
            given.append((self.url, round, upload, sender, signature))
            if len(given) == 2:
                raise Unreachable("once")

        def close(self) -> None:
            pass

    monkeypatch.setattr(strategy, "IntermediaryClient", Link)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    return given


def test_a_relay_gives_every_service_its_upload_as_the_node_signed_it(services):
    urls = ["https://a", "https://b", "https://c"]
    envelopes = [
        Envelope(
            task_id=bytes(32),
            round=7,
            sender=bytes([node]) * 16,
            uploads=tuple(Upload(bytes([i]) * 16, b"sealed") for i in range(3)),
            signatures=tuple(bytes([node, i]) * 32 for i in range(3)),
        )
        for node in (5, 6)
    ]
    for node in (0, 1, 0):  # the third time by a relay that was started again
        Relay(urls, ca=None).deliver(node, envelopes[node])
    again = services.pop(2)
    assert again == services[1]  # nobody answered, so it was said again
    assert [url for url, *_ in services] == ["https://a/0", "https://b/1", "https://c/2"] * 3
    sent = [envelopes[node] for node in (0, 1, 0)]
    assert [upload for _, _, upload, _, _ in services] == [upload for one in sent for upload in one.uploads]
    assert [sender for _, _, _, sender, _ in services] == [one.sender for one in sent for _ in range(3)]
    assert [signature for *_, signature in services] == [signature for one in sent for signature in one.signatures]
    with pytest.raises(ValueError, match="expected 2 uploads, one per service, got 3"):
        Relay(urls[:2], ca=None).deliver(0, envelopes[0])


def test_a_relay_asks_nodes_only_when_every_service_is_there_and_takes_uploads(task, monkeypatch):
    rounds, body = {"https://a": [1, 2], "https://b": [1, 1, 2]}, [sign(task, SIGNER)]

    class Link:
        def __init__(self, url, *, index=0, ca=None) -> None:
            self.url = url

        def task(self):
            return body[0]

        def status(self):
            if not rounds[self.url]:
                raise Unreachable("away")
            return SimpleNamespace(round=rounds[self.url].pop(0))

    monkeypatch.setattr(strategy, "IntermediaryClient", Link)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    relay = Relay(["https://a", "https://b"], ca=None)
    relay.begin_round(SimpleNamespace(round=2), 60.0)  # type: ignore[arg-type]
    assert rounds == {"https://a": [], "https://b": []}
    with pytest.raises(Unreachable, match="away"):
        relay.begin_round(SimpleNamespace(round=2), 60.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the task has 1 services, and dovetail-services names 2"):
        DovetailStrategy(relay, signer=SIGNER.public.key_id)
    one = Relay(["https://a"], ca=None)
    one.check(task)
    with pytest.raises(ValueError, match=r"https://a.* is a service of another task"):
        one.check(msgspec.structs.replace(task, name="another"))


def test_a_relay_between_a_grid_and_two_shuffler_services(tmp_path, monkeypatch):
    """Shares of a sum over real processes: the model is the average update, up to little noise."""
    nodes, enrolled = 3, []
    for node in range(nodes):
        (tmp_path / f"node-{node}").mkdir()
        key = KeyPair.generate("sign")
        key.save(tmp_path / f"node-{node}" / "key.json")
        enrolled.append(key.public)
    fields = {
        "name": "four numbers",
        "protocol": "split_and_mix",
        "settings": {"clip_norm": 1.0, "noise_multiplier": 0.01, "shufflers": 2, "shares": 4},
        "dim": 4,
        "rounds": 1,
        "min_clients": nodes,
        "max_clients": nodes,
        "round_seconds": 120.0,
        "delta": 1e-5,
    }
    deployment = fleet.make_deployment(tmp_path / "deployment", fields, shufflers=2, enrolled=enrolled)
    np.save(deployment.folder / "model.npy", np.zeros(4, np.float32))
    monkeypatch.setattr(mod, "_is_simulated", lambda: True)
    (tmp_path / "policy.json").write_bytes(msgspec.json.encode(fleet.lenient_policy(deployment.signed)))
    with fleet.Fleet(deployment) as running:
        running.start_analyzer()
        for index in range(2):
            running.start_service(index)
        flower_fleet.wait_until(lambda: answers(running), "the shufflers", seconds=120)
        config = {
            "dovetail-signer": deployment.signed.signer.key_id.hex(),
            "dovetail-ca": str(deployment.authority),
            "dovetail-services": " ".join(deployment.service_urls),
        }
        grid = Nodes({"dovetail-simulation": str(tmp_path)}, nodes)
        grid.tamper = lambda replies: [*map(changed_on_the_way, [replies[0]]), *replies]
        result = DovetailStrategy.from_config(config).start(grid, model_of(0, 0, 0, 0))
        (ended,) = running.privacy()["history"]
        refused = [running.counts(name).get("refused 401", 0) for name in deployment.services]
    assert (ended["outcome"], ended["uploads"]) == ("released", nodes)
    assert flatten(result.arrays) == pytest.approx([0.25] * 4, abs=0.03)  # nine standard deviations
    assert refused[0] == 1  # what a relay has changed is not the node's


def changed_on_the_way(reply: Message) -> Message:
    """A copy of the reply whose first upload is another one than the node signed."""
    envelope = envelope_in_reply(reply)
    other = Upload(bytes(16), envelope.uploads[0].sealed)
    changed = msgspec.structs.replace(envelope, uploads=(other, *envelope.uploads[1:]))
    return Message(RecordDict({"dovetail": ConfigRecord({"envelope": changed.encode()})}), reply_to=reply)


@contextlib.contextmanager
def sharing(folder: Path, monkeypatch, *, nodes: int, **fields) -> Iterator[tuple[fleet.Fleet, Nodes, dict]]:
    """Analyzer and two aggregators as processes, a grid of virtual nodes, and the configuration of a relay's run."""
    enrolled = []
    for node in range(nodes):
        (folder / f"node-{node}").mkdir(parents=True)
        key = KeyPair.generate("sign")
        key.save(folder / f"node-{node}" / "key.json")
        enrolled.append(key.public)
    asked = {
        "name": "four numbers",
        "protocol": "secagg",
        "settings": {"clip_norm": 1.0, "noise_multiplier": 0.01},
        "dim": 4,
        "min_clients": nodes,
        "max_clients": nodes,
        "delta": 1e-5,
    }
    made = fleet.make_deployment(folder / "deployment", {**asked, **fields}, aggregators=2, enrolled=enrolled)
    np.save(made.folder / "model.npy", np.zeros(4, np.float32))
    monkeypatch.setattr(mod, "_is_simulated", lambda: True)
    (folder / "policy.json").write_bytes(msgspec.json.encode(fleet.lenient_policy(made.signed)))
    with fleet.Fleet(made) as running:
        running.start_analyzer()
        for index in range(2):
            running.start_service(index)
        flower_fleet.wait_until(lambda: answers(running), "the aggregators", seconds=120)
        config = {
            "dovetail-signer": made.signed.signer.key_id.hex(),
            "dovetail-ca": str(made.authority),
            "dovetail-services": " ".join(made.service_urls),
        }
        yield running, Nodes({"dovetail-simulation": str(folder)}, nodes), config


def envelope_in(reply: Message, **changed) -> Message:
    """A reply with the same envelope, changed on the way."""
    envelope = msgspec.structs.replace(envelope_in_reply(reply), **changed)
    return Message(RecordDict({"dovetail": ConfigRecord({"envelope": envelope.encode()})}), reply_to=reply)


def one_bit_off(upload: Upload) -> Upload:
    return Upload(upload.report, upload.sealed[:-1] + bytes([upload.sealed[-1] ^ 1]))


def forged(replies: list[Message], before: list[Message]) -> list[Message]:
    """What a relay could make of the replies of a round and of the one before; every one must be refused."""
    mine, other = envelope_in_reply(replies[0]), envelope_in_reply(replies[1])
    relay = KeyPair.generate("sign")
    path = upload_path(mine.task_id, mine.round, 0)
    signed = signature_of(relay, "POST", path, mine.uploads[0].encode())
    old = envelope_in_reply(before[0])
    return [
        envelope_in(replies[0], uploads=(one_bit_off(mine.uploads[0]), mine.uploads[1])),
        envelope_in(replies[0], uploads=mine.uploads[::-1]),  # to the other aggregator
        envelope_in(replies[0], uploads=mine.uploads[::-1], signatures=mine.signatures[::-1]),
        envelope_in(replies[0], sender=other.sender),  # as another node's
        envelope_in(replies[0], uploads=other.uploads),  # another node's as one's own
        envelope_in(replies[0], sender=relay.public.key_id, signatures=(signed, signed)),  # as the relay's own
        envelope_in(before[0], round=mine.round),  # of the round before, as of this one
        envelope_in(replies[0], uploads=old.uploads, signatures=old.signatures),
    ]


def test_a_relay_of_shares_cannot_change_replay_or_keep_back_a_report_unnoticed(tmp_path, monkeypatch):
    """Four nodes, of whom three suffice: forgeries, an upload that one aggregator lacks, and two that both lack."""
    fields = {"min_clients": 3, "rounds": 4, "round_seconds": 12.0}
    refused, honest = [], Relay.deliver
    with sharing(tmp_path, monkeypatch, nodes=4, **fields) as (running, grid, config):
        replies: dict[int, list[Message]] = {}

        def tamper(said: list[Message]) -> list[Message]:
            replies[len(grid.sent)] = said
            if len(grid.sent) == 2:
                return [*forged(said, replies[1]), *said, said[0]]  # and the first one again
            return said[2:] if len(grid.sent) == 4 else said

        def half(relay: Relay, node: int, envelope: Envelope) -> None:
            if len(grid.sent) == 3 and node == 100:
                envelope.send_upload(0, relay._services[0])
                return
            try:
                honest(relay, node, envelope)
            except ValueError as reason:
                refused.append((len(grid.sent), str(reason)))
                raise

        grid.tamper = tamper
        monkeypatch.setattr(Relay, "deliver", half)
        DovetailStrategy.from_config(config).start(grid, model_of(0, 0, 0, 0))
        history = running.privacy()["history"]
    assert [(one["outcome"], one["uploads"]) for one in history[:3]] == [
        ("released", 4),
        ("released", 4),
        ("released", 3),
    ]
    assert history[3]["outcome"] == "void"
    assert [round for round, _ in refused] == [2] * 8, refused


def test_a_training_by_shares_moves_the_model_by_the_mean_update(tmp_path, monkeypatch):
    with sharing(tmp_path, monkeypatch, nodes=3, rounds=2, round_seconds=120.0) as (running, grid, config):
        result = DovetailStrategy.from_config(config).start(grid, model_of(0, 0, 0, 0))
        history = running.privacy()["history"]
    assert [(one["outcome"], one["uploads"]) for one in history] == [("released", 3)] * 2
    assert flatten(result.arrays) == pytest.approx([0.5] * 4, abs=0.05)  # ten standard deviations


def test_nodes_evaluate_and_what_they_find_leaves_in_the_noisy_sum_alone(tmp_path, monkeypatch):
    """Six nodes, of whom about half are held out: the means of their scores, and a statement that covers them."""
    measures = (Measure(kind="evaluation", weight=0.5),)
    fields = {"measures": measures, "held_out": 0.5, "dim": 7, "rounds": 1, "round_seconds": 120.0}
    with sharing(tmp_path, monkeypatch, nodes=6, **fields) as (running, grid, config):
        grid.train = app_of_messages(eval_loss=2.0, eval_acc=0.5)
        config["dovetail-analyzer"] = running.deployment.analyzer_url
        result = DovetailStrategy.from_config(config).start(grid, model_of(0, 0, 0, 0), evaluate_config=ConfigRecord())
        task, history = running.deployment.task, running.privacy()["history"]
    keys = [KeyPair.load(tmp_path / f"node-{node}" / "key.json").public.key_id for node in range(6)]
    held_out = sum(is_held_out(task.task_id, key, 0.5) for key in keys)
    assert [message.metadata.message_type for messages in grid.sent for message in messages[:1]] == [
        "evaluate",
        "train",
    ]
    assert [(one["outcome"], one["uploads"]) for one in history] == [("released", 6)]
    found_by_nodes = result.evaluate_metrics_clientapp[1]
    assert found_by_nodes["users"] == pytest.approx(held_out, abs=0.3)
    if held_out:
        assert found_by_nodes["accuracy"] == pytest.approx(0.5, abs=0.2)
        assert found_by_nodes["loss"] == pytest.approx(2.0, abs=1.0)
    assert flatten(result.arrays) == pytest.approx([0.25 * (6 - held_out) / 6] * 4, abs=0.05)


def test_relay_and_analyzer_together_have_no_update_and_no_share(tmp_path, monkeypatch):
    """What the server app was handed and what the analyzer wrote down, opened with all keys that the two have."""
    planted = np.array([0.123456, -0.234567, 0.345678, -0.456789], np.float32)

    def train(message: Message, context: Context) -> Message:
        moved = unflatten(flatten(message.content["arrays"]) + planted, message.content["arrays"])
        return Message(RecordDict({"arrays": moved}), reply_to=message)

    with sharing(tmp_path, monkeypatch, nodes=3, rounds=1, round_seconds=120.0) as (running, grid, config):
        grid.train, carried = train, []
        grid.tamper = lambda replies: carried.extend(replies) or replies
        DovetailStrategy.from_config(config).start(grid, model_of(0, 0, 0, 0))
        made = running.deployment
    seen = b"".join(message_to_proto(message).SerializeToString() for message in carried)
    known = {Path("carried"): seen, **files_under(made.folder / "analyzer", made.folder / "analyzer.log")}
    task, shares, analyzer_key = made.task, [], KeyRing(made.folder / "analyzer" / "keys", "seal").current()
    for reply in carried:
        envelope = envelope_in_reply(reply)
        for index, upload in enumerate(envelope.uploads):
            assert upload.sealed in seen
            purpose = task.upload_purpose(1, index, sender=envelope.sender, report=upload.report)
            for meant in (purpose, task.message_purpose(1), task.sum_purpose(1, index, batch=bytes(16))):
                with pytest.raises(Unsealable):
                    open_sealed(upload.sealed, analyzer_key.opening_key(), meant)
            keys = ServicePairs.find(made.folder / f"aggregator-{index}" / "keys", task.aggregators[index])
            shares.append(open_sealed(upload.sealed, keys.seal.opening_key(), purpose)[8:])
    assert len(shares) == 6 and len(set(shares)) == 6
    update = [planted.tobytes(), planted.astype(np.float64).tobytes()]
    assert found([*update, *shares], known) == set()
    assert found([envelope_in_reply(carried[0]).uploads[0].report], known)  # it is searched


def answers(running: fleet.Fleet) -> bool:
    try:
        return not any(running.service(index).status().over for index in range(2))
    except Unreachable:
        return False


# --- the example


def test_no_key_that_lies_about_is_shipped_to_nodes(tmp_path):
    from flwr.cli.build import build_fab_from_disk

    app = tmp_path / "app"
    shutil.copytree(flower_fleet.EXAMPLE, app, ignore=shutil.ignore_patterns("__pycache__"))
    KeyPair.generate("sign").save(app / "key.json")
    KeyPair.generate("sign").save(app / "flower_mnist" / "key.json")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as shipped:
        names = set(shipped.namelist())
    assert "flower_mnist/client_app.py" in names and not [name for name in names if name.endswith("json")]


def fleet_of(kind: str, folder: Path) -> str:
    """Run the example in namespaces of its own; what `flwr run` said."""
    alone = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip(
            "Flower's engine listens on all addresses: needs `unshare --net`, which this machine does not allow"
        )
    command = [*alone, sys.executable, flower_fleet.__file__, kind, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2400, check=False)
    logs = {path.name: path.read_text()[-1500:] for path in folder.glob("*.log")} if done.returncode else {}
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{json.dumps(logs, indent=1)}"
    return (folder / "flwr-run.log").read_text()


def accuracies(said: str) -> list[float]:
    return [float(found) for found in re.findall(r"after round \d of 3: \{'accuracy': ([0-9.]+)\}", said)]


def check_training(folder: Path, said: str, uploads: list[int], *, nodes: int) -> None:
    """Three releases in the analyzer's ledger, and a model that learned.

    The first is right on a ninth of the test images. In 40 runs of a model of the deployment in NumPy, with Gaussian
    noise and where node 0 does not train, the last was right on 0.56 of them, and never on less than 0.43.
    """
    facts = json.loads((folder / "privacy.json").read_text())
    assert [(one["outcome"], one["uploads"]) for one in facts["history"]] == [("released", count) for count in uploads]
    ledger = Ledger.reopen(folder / "deployment" / "analyzer" / "ledger.db")
    assert [entry.round for entry in ledger.entries if entry.kind == "release"] == [1, 2, 3]
    assert ledger.total[0] == facts["spent"]["eps"] <= flower_fleet.EPS
    ledger.close()
    reported = re.findall(r"(\d+) of (\d+) nodes reported", said)  # a reply with anything beside its envelope is none
    assert reported == [(str(count), str(nodes)) for count in uploads]
    measured = accuracies(said)
    assert len(measured) == 4 and measured[0] < 0.2 and measured[-1] > 0.25


def check_files(folder: Path, *, nodes: int) -> None:
    """Nothing of an update or a share in the files of SuperLink, server app and analyzer; aggregators forgot theirs."""
    deployment = folder / "deployment"
    told = [flower_fleet.told_by(deployment, node) for node in range(nodes)]
    shares = [secret for one in told for secret in one.secrets]
    assert len(set(shares)) == nodes * (1 + 3 + 3 + 3)
    logs = [folder / f"{name}.log" for name in ("superlink", "flwr-run", "services")]
    theirs = files_under(folder / "flwr", *folder.glob("superlink.db*"), *logs, deployment / "analyzer")
    assert {"superlink.log", "flwr-run.log", "services.log", "book.db", "ledger.db"} <= {path.name for path in theirs}
    assert found([*flower_fleet.planted(), *shares], theirs) == set()
    assert found(shares, files_under(deployment / "aggregator-0", deployment / "aggregator-1")) == set()
    assert found([flower_fleet.task_of(deployment).task_id], theirs)  # they are searched


def test_five_lines_of_a_plain_app_change():
    """The README shows all of them: without the lines that it adds, and with those that it takes away, it is plain."""
    added = removed = 0
    for name, shown in re.findall(
        r"```diff\n # (\w+\.py)\n(.*?)```", (flower_fleet.EXAMPLE / "README.md").read_text(), re.S
    ):
        code = (flower_fleet.EXAMPLE / "flower_mnist" / name).read_text()
        lines = [line for line in shown.splitlines() if line.startswith("+")]
        assert all(f"{line[1:]}\n" in code for line in lines), name
        for line in lines:
            code = code.replace(f"{line[1:]}\n", "", 1)
        assert "dovetail" not in code.lower().partition('"""\n')[2], name
        added, removed = added + len(lines), removed + shown.count("\n-") + shown.startswith("-")
    assert (added, removed) == (5, 4)
    assert "parties" not in (flower_fleet.EXAMPLE / "flower_mnist" / "task.py").read_text()


def test_the_example_runs_in_flowers_simulation(tmp_path):
    said = fleet_of("simulation", tmp_path)
    check_training(tmp_path, said, [flower_fleet.VIRTUAL_NODES] * 3, nodes=flower_fleet.VIRTUAL_NODES)
    check_files(tmp_path, nodes=flower_fleet.VIRTUAL_NODES)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deployment")
    return folder, fleet_of("deployment", folder)


def test_the_example_runs_as_a_deployment_with_tls_and_authenticated_nodes(deployed):
    folder, said = deployed
    every = flower_fleet.GOOD_NODES + 1
    check_training(folder, said, [every, every, every - 1], nodes=every)
    # the node that would spend more than it wants refuses, and says why on its own machine only
    own = (folder / f"node-{flower_fleet.GOOD_NODES}.log").read_text()
    why = r"refused: round 3 would bring all tasks to .* above the policy's eps_lifetime=25\.0, delta_lifetime=0\.0001"
    assert len(re.findall(why, own)) == 1
    assert said.count("this node refuses the round") == 1 and "would bring all tasks to" not in said
    (spent,) = (folder / "deployment" / f"node-{flower_fleet.GOOD_NODES}").rglob("task-*.db")
    with contextlib.closing(Ledger.reopen(spent)) as ledger:
        assert ledger.total[0] <= flower_fleet.THRIFTY
    # what training code told beside its model never reached the SuperLink, where envelopes did
    task_id = bytes.fromhex(json.loads((folder / "privacy.json").read_text())["task_id"])
    carried = b"".join(path.read_bytes() for path in folder.glob("superlink.*"))
    assert task_id in carried
    assert flower_fleet.SECRET.encode() not in carried
    assert "All SuperNodes must be registered" in (folder / "stranger.log").read_text()


def test_the_relay_and_the_analyzer_of_the_deployment_never_had_an_update_or_a_share(deployed):
    """In files, and in memory wherever it was looked at; the same search finds what each of them may have."""
    folder, _ = deployed
    check_files(folder, nodes=flower_fleet.GOOD_NODES)
    seen = json.loads((folder / "memory.json").read_text())
    for kind in flower_fleet.PROCESSES:
        assert seen[kind]["looks"] >= 3 and seen[kind]["task"] > 0, kind
        assert seen[kind]["update"] == 0 and seen[kind]["share"] == 0, kind
    assert seen["superlink"]["sealed"] > 0 and seen["server app"]["sealed"] > 0
    assert seen["analyzer"]["sealed"] == 0
    assert seen["aggregator's file"]["share"] > 0


def test_nodes_behind_the_proxy_take_part_and_reach_nothing_else(deployed):
    folder, said = deployed
    if shutil.which("nginx") is None:
        pytest.skip("the example's proxy is a configuration of nginx, which this machine does not have")
    answers = json.loads((folder / "proxy.json").read_text())
    proxy, superlink = answers[str(flower_fleet.PROXY)], answers[str(flower_fleet.SUPERLINK)]
    assert proxy[flower_fleet.FLEET_PATH] == superlink[flower_fleet.FLEET_PATH], "the SuperLink's own answer"
    assert superlink["/v1/control/list-runs"][0] == 200, "it asks nobody who they are"
    for path in flower_fleet.OTHER_PATHS:
        status, page = proxy[path]
        assert status == 404 and "nginx" in page, path
    # every other node went through it, and all that were asked reported
    assert f"{flower_fleet.GOOD_NODES + 1} of {flower_fleet.GOOD_NODES + 1} nodes reported" in said
    assert not re.search(r"\[(error|crit|alert|emerg)\]", (folder / "proxy.log").read_text())
