"""The five lines of the README: train on digits at eps 2, and print the accuracy and the privacy statement."""

import dovetail

result = dovetail.train("digits", protocol="dp_fl", eps=2.0, delta=1e-5)
print(f"{result.accuracy:.1%}")  # noqa: T201
print(result.statement)  # noqa: T201
