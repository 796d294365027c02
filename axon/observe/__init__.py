"""What observes a run: metrics, trackers, progress, plots, the record of where it ran."""
