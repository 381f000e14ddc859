"""The server app's side: it relays sealed reports to the aggregators, and tests the models that come out."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from dovetail.parties.flower import DovetailStrategy
from flower_mnist import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the task that the analyzer has."""
    data = task.load(str(context.run_config["dataset"]))
    model = task.model_for(data)

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": task.accuracy(model, data)})

    strategy = DovetailStrategy.from_config(context.run_config)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), evaluate_fn=evaluate)
