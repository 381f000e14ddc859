"""What Dovetail puts into Flower's messages, and how it reads them back.

To a node: the model as Flower's arrays, and beside it one record with the signed task and the round. From a node: one
record with the sealed envelope, and nothing beside it. A model is one flat float32 vector for all parties but the
training code, which sees its own arrays under its own names.
"""

from __future__ import annotations

import msgspec
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from dovetail._structs import ready
from dovetail.parties.common.task import SignedTask
from dovetail.parties.user.client import Envelope

__all__ = ["envelope_of", "flatten", "instruction", "reply_with", "told", "unflatten"]

_DOVETAIL, _ARRAYS, _CONFIG = "dovetail", "arrays", "config"
_TASK, _ROUND, _ENVELOPE = "task", "round", "envelope"


def instruction(arrays: ArrayRecord, config: ConfigRecord, signed: SignedTask, round: int) -> RecordDict:
    """What a node is sent in a round; `config` is for its training code."""
    record = ConfigRecord({_TASK: msgspec.json.encode(signed), _ROUND: round})
    return RecordDict({_ARRAYS: arrays, _CONFIG: config, _DOVETAIL: record})


def told(message: Message) -> tuple[SignedTask, int, ArrayRecord]:
    """The task, the round and the model that a node was sent; refuses a message that lacks one."""
    record = message.content.config_records.get(_DOVETAIL)
    if record is None or len(message.content.array_records) != 1:
        raise ValueError("expected a message with a task of Dovetail and one model, got another one")
    body, round = record.get(_TASK), record.get(_ROUND)
    if not isinstance(body, bytes) or not isinstance(round, int):
        raise ValueError("expected a message with a signed task and a round, got another one")
    try:
        signed = msgspec.json.decode(body, type=ready(SignedTask))
    except msgspec.MsgspecError as error:
        raise ValueError(f"expected a signed task, got something else ({error})") from error
    return signed, round, next(iter(message.content.array_records.values()))


def reply_with(envelope: Envelope, message: Message) -> Message:
    """The reply that holds an envelope and nothing else."""
    record = ConfigRecord({_ENVELOPE: envelope.encode()})
    return Message(RecordDict({_DOVETAIL: record}), reply_to=message)


def envelope_of(reply: Message) -> Envelope:
    """The envelope in a node's reply; refuses a reply with anything beside it."""
    content = reply.content
    record = content.config_records.get(_DOVETAIL)
    if list(content) != [_DOVETAIL] or record is None or list(record) != [_ENVELOPE]:
        raise ValueError("expected a reply with a sealed envelope and nothing else, got another one")
    body = record[_ENVELOPE]
    if not isinstance(body, bytes):
        raise ValueError(f"expected a sealed envelope in bytes, got {type(body).__name__}")
    try:
        return Envelope.decode(body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"expected a sealed envelope, got something else ({error})") from error


def flatten(arrays: ArrayRecord) -> np.ndarray:
    """All numbers of a model, array after array, as one float32 vector of its own; refuses arrays of integers."""
    parts = []
    for name, array in arrays.items():
        values = array.numpy()
        if not np.issubdtype(values.dtype, np.floating):
            raise ValueError(f"expected arrays of floating-point numbers, got {values.dtype} in {name!r}")
        parts.append(values.astype(np.float32).ravel())
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def unflatten(vector: np.ndarray, like: ArrayRecord) -> ArrayRecord:
    """The vector as arrays with the names, shapes and types of `like`."""
    shapes = {name: array.numpy() for name, array in like.items()}
    sizes = [values.size for values in shapes.values()]
    if sum(sizes) != len(vector):
        raise ValueError(f"expected a model of {len(vector)} numbers, as the task says, got {sum(sizes)}")
    parts = np.split(vector, np.cumsum(sizes)[:-1])
    return ArrayRecord(
        {
            name: Array(part.reshape(values.shape).astype(values.dtype))
            for (name, values), part in zip(shapes.items(), parts, strict=True)
        }
    )
