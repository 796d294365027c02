"""Axon: write the mathematics once, in named axes; a layout says where each axis lives."""
