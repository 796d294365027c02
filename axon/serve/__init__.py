"""A trained model that answers: generation."""
