"""``python -m specdec_fast``."""

import sys

from .cli import main

sys.exit(main())
