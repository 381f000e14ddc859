"""`python -m dovetail.cli`."""

from dovetail.cli import main

main()
