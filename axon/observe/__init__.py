"""Observing a run: metrics, trackers, progress, plots, and a record of versions and hardware."""
