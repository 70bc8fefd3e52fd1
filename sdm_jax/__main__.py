"""`python -m sdm_jax`: the command line."""

import sys

from sdm_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
