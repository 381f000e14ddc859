"""A PyTorch module trained in simulation with user-level differential privacy, in ten lines."""

from torch import nn

import dovetail

module = nn.Sequential(nn.Unflatten(1, (1, 8)), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
result = dovetail.train("digits", model=module, protocol="dp_fl", eps=4.0)
print(f"{result.accuracy:.1%} (majority-class baseline: {result.baseline['accuracy']:.1%})")  # noqa: T201
print(result.statement)  # noqa: T201
module.load_state_dict(result.state_dict())
