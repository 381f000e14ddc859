"""`python -m dovetail`."""

from dovetail.cli import main

main()
