"""`python -m imagematrix`: the command line without its script."""

from imagematrix.cli import main

if __name__ == "__main__":  # spawned child processes import this module too
    main()
