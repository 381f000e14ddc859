"""What a node runs around its training code: the model goes in, a sealed envelope comes out, nothing else leaves.

The mod takes the difference between the arrays that the training code returns and those it was given, and hands it to
the agent of the node, a process of its own that holds the node's policy, ledger and randomness (the agent's socket is
`dovetail-agent` in the node's own configuration). Metrics, numbers of examples, and the words of errors stay on the
node: they would tell of its data what nobody has accounted for. The app may be written for messages (`@app.train()`) or
be made of a `client_fn` that gives a `NumPyClient`.

Where a task measures something (`dovetail task new --measure evaluation --held-out .2`), a node is first asked to
evaluate the model that it is to train. What its evaluating code says stays on the node, in the state that Flower keeps
there, until it trains: the agent adds it to the report as further coordinates of the same noisy sum.

The nodes of a simulation are virtual and have no agents: there, and only there, every node is a client in this process.
Node i has its files in `node-<i>` of the folder `dovetail-simulation` of the run's configuration, as `dovetail client
new` makes them: services accept uploads from keys that are enrolled, so keys are made before a simulation.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord
from flwr.common.constant import ErrorCode

from dovetail.parties.common.http_clients import Rejected
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.flower.messages import (
    evaluation_reply,
    facts_in_reply,
    flatten,
    instruction_to_client,
    parameters_key,
    read_instruction,
    reply_with,
)
from dovetail.parties.user.agent import Agent
from dovetail.parties.user.client import Client, Reporter, RoundCall
from dovetail.parties.user.policy import Policy, Refused

__all__ = ["dovetail_mod"]

_AGENT, _SIMULATION, _PARTITION = "dovetail-agent", "dovetail-simulation", "partition-id"
_POLICY, _KEY = "policy.json", "key.json"
_CLIENT_FN, _FACTS, _FACTS_OF = "dovetail-client-fn", "dovetail-facts", "dovetail-facts-of"  # in the node's own state
Shapes = list[tuple[str, tuple[int, ...]]]
_LOG = logging.getLogger("flwr")  # the one that Flower shows


def dovetail_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Let the node train, and reply with the sealed report of its update; put it first among an app's mods.

    Guarantees:
        A reply holds an envelope, that the node has evaluated, or an error in one of a few fixed sentences; nothing
        that the app's code said.
        Nothing but training and evaluating is answered.
        The update goes to the agent of the node's own configuration, whatever a message or a run says.
    """
    kind = message.metadata.message_type.partition(".")[0]
    if kind not in ("train", "evaluate"):
        return _refusal_reply(message, "this node answers messages to train and to evaluate alone")
    # Flower sends the words of any exception to the server: none may get past here
    try:
        call, arrays = read_instruction(message)
        before = flatten(arrays)
        shapes = _named_shapes(arrays)
        reporter = _reporter(context)
    except Exception as error:
        _LOG.error("%s: %s", type(error).__name__, error)
        return _refusal_reply(message, "this node cannot train this task or this model; its own log says why")
    doing = "training" if kind == "train" else "evaluation"
    try:
        reply = _ask_app(kind, message, context, call_next)
        if kind == "evaluate":
            _keep_facts(context, call, facts_in_reply(reply))
            return evaluation_reply(message)
        update = _trained_model(reply, shapes, named=not _is_of_client_fn(context)) - before
    except Exception:
        _LOG.exception("%s failed", doing)
        return _refusal_reply(message, f"{doing} failed on this node; the error stays in its own log")
    try:
        return reply_with(reporter.answer(call, update, _facts_for(context, call)), message)
    except (Refused, Rejected) as reason:
        _LOG.error("refused: %s", reason)
        return _refusal_reply(message, "this node refuses the round; its own log says why")
    except Exception as error:
        _LOG.error("not reported: %s: %s", type(error).__name__, error)
        return _refusal_reply(message, "this node's agent did not answer")


def _ask_app(
    kind: str, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """The reply of the app's code, which may look for its model where Flower's older messages have it.

    An app that is made of a `client_fn` fails to find its model before it does anything with it; the node's state keeps
    in mind that this run's app is one.
    """
    if not _is_of_client_fn(context):
        try:
            return call_next(message, context)
        except KeyError as error:
            if error.args != (parameters_key(kind),):
                raise
        context.state[_CLIENT_FN] = ConfigRecord({"run": context.run_id})
    message.content = instruction_to_client(message.content, kind)
    return call_next(message, context)


def _is_of_client_fn(context: Context) -> bool:
    """Whether this run's app was found to be made of a `client_fn`; the state of a node outlives a run."""
    of = context.state.get(_CLIENT_FN)
    return of is not None and of["run"] == context.run_id


def _keep_facts(context: Context, call: RoundCall, facts: dict[str, float | list[float]]) -> None:
    """Keep what the app's code found in a round, on the node, until it reports to that round."""
    context.state[_FACTS] = MetricRecord(facts)
    context.state[_FACTS_OF] = ConfigRecord({"task": call.status.task_id, "round": call.status.round})


def _facts_for(context: Context, call: RoundCall) -> dict[str, float | list[float]]:
    """What the app's code found in the round of this call; nothing if it did not evaluate."""
    of = context.state.get(_FACTS_OF)
    if of is None or (of["task"], of["round"]) != (call.status.task_id, call.status.round):
        return {}
    return dict(context.state[_FACTS])


def _trained_model(reply: Message, shapes: Shapes, *, named: bool) -> np.ndarray:
    """The model in the reply of the training code, whose arrays have names unless it is a `NumPyClient`."""
    if not reply.has_content() or len(reply.content.array_records) != 1:
        raise ValueError("the training code must reply with exactly one model (ArrayRecord)")
    (arrays,) = reply.content.array_records.values()
    given = _named_shapes(arrays)
    if (given != shapes) if named else ([shape for _, shape in given] != [shape for _, shape in shapes]):
        raise ValueError(f"the training code must reply with the arrays {shapes}, and gave {given}")
    return flatten(arrays)


def _named_shapes(arrays: ArrayRecord) -> Shapes:
    return [(name, array.numpy().shape) for name, array in arrays.items()]


def _refusal_reply(message: Message, sentence: str) -> Message:
    return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=sentence), reply_to=message)


def _reporter(context: Context) -> Reporter:
    """Who randomizes and seals for this node."""
    if _AGENT in context.node_config:
        return Agent(Path(str(context.node_config[_AGENT])))
    if _is_simulated() and context.run_config.get(_SIMULATION):
        folder = Path(str(context.run_config[_SIMULATION]))
        return _virtual_client(folder, int(context.node_config[_PARTITION]))
    raise ValueError(
        f"the configuration of this node lacks {_AGENT!r}, the socket of its agent (dovetail client agent)"
    )


def _is_simulated() -> bool:
    """Whether this process is one of Flower's simulation engine: a real node is no worker of Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _virtual_client(folder: Path, partition: int) -> Client:
    """The client of a virtual node: by the files in its folder, else with a fresh key and the policy of all."""
    home = folder / f"node-{partition}"
    policy = Policy.read(home / _POLICY if (home / _POLICY).exists() else folder / _POLICY)
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (home / _KEY).exists():
        KeyPair.generate("sign").save(home / _KEY)
    return Client(home, policy=policy, key=KeyPair.load(home / _KEY), witness=folder / "witness")
