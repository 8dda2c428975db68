"""`python -m lowbit` is the command `lowbit`."""

from lowbit.cli import main

main()
