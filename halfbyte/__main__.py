"""`python -m halfbyte` is `quantize`."""

import sys

from halfbyte.cli import main

sys.exit(main())
