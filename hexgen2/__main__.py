"""`python -m hexgen2`: the command line."""

from hexgen2.cli import main

main()
