"""What suites of serving share: `memory_engine.py`, imported by its name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
