"""Where Flower is not installed its tests are not there; `make flower` installs it and asks for them."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("flwr") else ["test_flower.py"]
