"""What Dovetail puts into Flower's messages, and how it is read back.

To a node: the model as Flower's arrays, and beside it one record with what calls it to a round: the signed task, the
analyzer's signed status and the signer's notices. From a node that trained: one record with the sealed envelope, and
nothing beside it. From a node that evaluated: that it did. A model is one flat float32 vector for all parties but the
training code, which sees its own arrays under its own names, or in their order if it is made of a `client_fn`.
"""

from __future__ import annotations

import msgspec
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from dovetail._structs import resolve_fields
from dovetail.parties.user.client import Envelope, RoundCall

__all__ = [
    "envelope_in_reply",
    "evaluation_reply",
    "facts_in_reply",
    "flatten",
    "instruction_to_client",
    "make_instruction",
    "parameters_key",
    "read_instruction",
    "reply_with",
    "unflatten",
]

_DOVETAIL, _ARRAYS, _CONFIG = "dovetail", "arrays", "config"
_CALL, _ENVELOPE, _EVALUATED = "call", "envelope", "evaluated"
_OLDER = {"train": "fitins", "evaluate": "evaluateins"}  # what messages to a `client_fn` call their records
_FACTS = {"loss": ("eval_loss",), "accuracy": ("eval_accuracy", "eval_acc")}  # and how Flower's own examples call them


def make_instruction(arrays: ArrayRecord, config: ConfigRecord, call: RoundCall) -> RecordDict:
    """What a node is sent in a round.

    Arguments:
        arrays: the model.
        config: for the node's training code.
        call: what calls the node to the round.
    """
    record = ConfigRecord({_CALL: msgspec.json.encode(call)})
    return RecordDict({_ARRAYS: arrays, _CONFIG: config, _DOVETAIL: record})


def read_instruction(message: Message) -> tuple[RoundCall, ArrayRecord]:
    """What calls a node to a round, and the model that it was sent; refuses a message that lacks one."""
    record = message.content.config_records.get(_DOVETAIL)
    if record is None or len(message.content.array_records) != 1:
        raise ValueError("the message lacks a record of Dovetail's, or has not exactly one model")
    body = record.get(_CALL)
    if not isinstance(body, bytes):
        raise ValueError("the message lacks the signed task and the round's signed status")
    try:
        call = msgspec.json.decode(body, type=resolve_fields(RoundCall))
    except msgspec.MsgspecError as error:
        raise ValueError(f"the message calls to a round in a form that this version does not read ({error})") from error
    return call, next(iter(message.content.array_records.values()))


def parameters_key(kind: str) -> str:
    """Under which name an app that is made of a `client_fn` looks for its model: `kind` is "train" or "evaluate"."""
    return f"{_OLDER[kind]}.parameters"


def instruction_to_client(content: RecordDict, kind: str) -> RecordDict:
    """The same model and configuration for an app that is made of a `client_fn`: arrays in their order, without names.

    Arguments:
        content: what the node was sent.
        kind: "train" or "evaluate".
    """
    (arrays,) = content.array_records.values()
    numbered = ArrayRecord({str(place): array for place, array in enumerate(arrays.values())})
    config = content.config_records.get(_CONFIG) or ConfigRecord()
    return RecordDict({parameters_key(kind): numbered, f"{_OLDER[kind]}.config": config})


def facts_in_reply(reply: Message) -> dict[str, float | list[float]]:
    """The numbers in the reply of evaluating code, by name; `loss` and `accuracy` also under Flower's usual names."""
    if not reply.has_content():
        raise ValueError("the evaluating code replied with an error")
    facts: dict[str, float | list[float]] = {}
    for name, record in [*reply.content.config_records.items(), *reply.content.metric_records.items()]:
        if name.endswith(".status"):
            if record.get("code"):
                raise ValueError(f"the client does not evaluate: {record.get('message')}")
            continue
        for key, value in record.items():
            if isinstance(value, int | float):
                facts[key] = float(value)
            elif isinstance(value, list) and all(isinstance(item, int | float) for item in value):
                facts[key] = [float(item) for item in value]
    for wanted, others in _FACTS.items():
        given = next((other for other in others if other in facts), None)
        if wanted not in facts and given is not None:
            facts[wanted] = facts[given]
    return facts


def evaluation_reply(message: Message) -> Message:
    """The reply of a node that has evaluated: that it did, and none of what it found."""
    return Message(RecordDict({_DOVETAIL: ConfigRecord({_EVALUATED: True})}), reply_to=message)


def reply_with(envelope: Envelope, message: Message) -> Message:
    """The reply that holds an envelope and nothing else."""
    record = ConfigRecord({_ENVELOPE: envelope.encode()})
    return Message(RecordDict({_DOVETAIL: record}), reply_to=message)


def envelope_in_reply(reply: Message) -> Envelope:
    """The envelope in a node's reply; refuses a reply with anything beside it."""
    content = reply.content
    record = content.config_records.get(_DOVETAIL)
    if list(content) != [_DOVETAIL] or record is None or list(record) != [_ENVELOPE]:
        raise ValueError(
            f"expected a reply with a sealed envelope and nothing else, got one with {sorted(content)}: is "
            "dovetail_mod the first of the app's mods?"
        )
    body = record[_ENVELOPE]
    if not isinstance(body, bytes):
        raise ValueError(f"expected a sealed envelope in bytes, got {type(body).__name__}")
    try:
        return Envelope.decode(body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"this is not a sealed envelope of this version ({error})") from error


def flatten(arrays: ArrayRecord) -> np.ndarray:
    """All numbers of a model, array after array, as one float32 vector of its own; refuses arrays of integers."""
    parts = []
    for name, array in arrays.items():
        values = array.numpy()
        if not np.issubdtype(values.dtype, np.floating):
            raise ValueError(f"the array {name!r} holds {values.dtype}; a model has floating-point numbers alone")
        parts.append(values.astype(np.float32).ravel())
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def unflatten(vector: np.ndarray, like: ArrayRecord) -> ArrayRecord:
    """The vector as arrays with the names, shapes and types of `like`."""
    shapes = {name: array.numpy() for name, array in like.items()}
    sizes = [values.size for values in shapes.values()]
    if sum(sizes) != len(vector):
        raise ValueError(f"the task is for a model of {len(vector)} numbers, and these arrays have {sum(sizes)}")
    parts = np.split(vector, np.cumsum(sizes)[:-1])
    return ArrayRecord(
        {
            name: Array(part.reshape(values.shape).astype(values.dtype))
            for (name, values), part in zip(shapes.items(), parts, strict=True)
        }
    )
