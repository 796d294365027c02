"""`python -m axon`, the same as the command `axon`."""

from axon.cli import main

main()
