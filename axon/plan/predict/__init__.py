"""Predictions of a training step on a machine that is not here: the memory of a device, and seconds.

Nothing is compiled. `work` says what a step does, from the model's own declarations; `shards` what a device has of it
under a layout; `memory` and `seconds` what that takes; `links` how long collectives are. See docs/planner.md.
"""
