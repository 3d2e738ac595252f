"""`python -m gapless`."""

import sys

from gapless.cli import main

if __name__ == "__main__":
    sys.exit(main())
