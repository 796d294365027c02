"""What is printed for a person: a run's layout, its traffic, its compiled step."""
