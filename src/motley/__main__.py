"""`python -m motley`: the command line, where no `motley` script is installed."""

from motley.cli import main

main()
