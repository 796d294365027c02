"""Printed output for a person: a run's layout, its traffic, its compiled step."""
