"""Inference with a trained model: generation."""
