"""What a node runs around its training code: the model goes in, a sealed envelope comes out, nothing else leaves.

The mod takes the difference between the arrays that the training code returns and those it was given, and hands it to
the agent of the node, a process of its own that holds the node's policy, ledger and randomness (the agent's socket is
`dovetail-agent` in the node's own configuration). Metrics, numbers of examples, and the words of errors stay on the
node: they would tell of its data what nobody has accounted for.

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
from flwr.app import ArrayRecord, Context, Error, Message
from flwr.common.constant import ErrorCode

from dovetail.parties.common.http_clients import Rejected
from dovetail.parties.common.keys import KeyPair
from dovetail.parties.flower.messages import flatten, read_instruction, reply_with
from dovetail.parties.user.agent import Agent
from dovetail.parties.user.client import Client, Reporter
from dovetail.parties.user.policy import Policy, Refused

__all__ = ["dovetail_mod"]

_AGENT, _SIMULATION, _PARTITION = "dovetail-agent", "dovetail-simulation", "partition-id"
_POLICY, _KEY = "policy.json", "key.json"
Shapes = list[tuple[str, tuple[int, ...]]]
_LOG = logging.getLogger("flwr")  # the one that Flower shows


def dovetail_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Let the node train, and reply with the sealed report of its update; put it first among an app's mods.

    Guarantees:
        A reply holds an envelope, or an error in one of a few fixed sentences; nothing that the training code said.
        Nothing but training is answered.
        The update goes to the agent of the node's own configuration, whatever a message or a run says.
    """
    if message.metadata.message_type.partition(".")[0] != "train":
        return _refusal(message, "this node answers messages to train alone")
    # Flower sends the words of any exception to the server: none may get past here
    try:
        call, arrays = read_instruction(message)
        before = flatten(arrays)
        shapes = _shapes(arrays)
        reporter = _reporter(context)
    except Exception as error:
        _LOG.error("%s: %s", type(error).__name__, error)
        return _refusal(message, "this node cannot train this task or this model; its own log says why")
    try:
        update = _trained_model(call_next(message, context), shapes) - before
    except Exception:
        _LOG.exception("training failed")
        return _refusal(message, "training failed on this node; the error stays in its own log")
    try:
        return reply_with(reporter.answer(call, update), message)
    except (Refused, Rejected) as reason:
        _LOG.error("refused: %s", reason)
        return _refusal(message, "this node refuses the round; its own log says why")
    except Exception as error:
        _LOG.error("not reported: %s: %s", type(error).__name__, error)
        return _refusal(message, "this node's agent did not answer")


def _trained_model(reply: Message, shapes: Shapes) -> np.ndarray:
    """The model in the reply of the training code."""
    if not reply.has_content() or len(reply.content.array_records) != 1:
        raise ValueError("the training code must reply with exactly one model (ArrayRecord)")
    (arrays,) = reply.content.array_records.values()
    if _shapes(arrays) != shapes:
        raise ValueError(f"the training code must reply with the arrays {shapes}, and gave {_shapes(arrays)}")
    return flatten(arrays)


def _shapes(arrays: ArrayRecord) -> Shapes:
    return [(name, array.numpy().shape) for name, array in arrays.items()]


def _refusal(message: Message, sentence: str) -> Message:
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
