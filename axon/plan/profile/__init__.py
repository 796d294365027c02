"""What a traced step spent its time on: by module, by kind of operation, by mesh axis, beside the prediction."""

from axon.plan.profile.profile import Row, StepProfile

__all__ = ["Row", "StepProfile"]
