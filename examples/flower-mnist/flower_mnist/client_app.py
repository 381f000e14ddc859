"""The node's side: plain PyTorch on the node's own records; `dovetail_mod` sees to what leaves."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from dovetail.parties.flower import dovetail_mod
from flower_mnist import task

app = ClientApp(mods=[dovetail_mod])


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model that came on this node's records."""
    node, run = context.node_config, context.run_config
    data = task.load(str(run["dataset"]))
    model = task.model_for(data)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = task.share(data, int(node["partition-id"]), int(node["num-partitions"]))
    task.train(
        model,
        inputs,
        labels,
        learning_rate=float(run["learning-rate"]),
        epochs=int(run["local-epochs"]),
        batch=int(run["batch-size"]),
    )
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict())}), reply_to=message)
