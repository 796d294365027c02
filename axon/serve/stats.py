"""Counts of an engine."""

from dataclasses import dataclass


@dataclass
class Counts:
    """Since an engine began.

    Attributes:
        prefix_hits, prefix_queries: of the tokens that requests began with, how many were cached already, and how many
            there were. preemptions: how often a request lost its pages, to be computed again. host_seconds: the host's
            work for all steps, waiting for the devices left out, but for a draft model's.
    """

    prefix_hits: int = 0
    prefix_queries: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    host_seconds: float = 0.0


@dataclass
class Stats(Counts):
    """Of an engine, now and since it began: also what `Counts` has.

    Attributes:
        running, waiting: requests. pages, free_pages: of all pools. drafted, accepted: tokens that were guessed and
            verified, and of these those that were right. compiles: programs, a draft model's included.
    """

    running: int = 0
    waiting: int = 0
    pages: int = 0
    free_pages: int = 0
    drafted: int = 0
    accepted: int = 0
    compiles: int = 0
