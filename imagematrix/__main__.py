"""`python -m imagematrix`: the command line, where its script is not on the path."""

from imagematrix.cli import main

if __name__ == "__main__":  # a process that is spawned imports this module, too
    main()
