"""What the suites of parity share: `parity.py` and `mechanisms.py`, imported by their names."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
