"""A server in a process of its own: `member.py SECONDS DRAIN`, of a step and until what runs is broken off."""

import sys

from fake import FakeEngine, served

from axon.serve.http.limits import Limits
from axon.serve.http.serve import bound, serve

if __name__ == "__main__":
    limits = Limits(drain_seconds=float(sys.argv[2]))
    engine = FakeEngine(seconds=float(sys.argv[1]))
    whole = serve(served(engine), bound("127.0.0.1", 0), limits, lambda line: print(line, flush=True))
    sys.exit(0 if whole else 3)
