"""Functions that a rollout's `keep` names in a configuration."""


def short(prompt: str, answer: str) -> float:
    """The shorter, the better; of equals the one that has the prompt's first letter more often."""
    return -len(answer) + 0.01 * answer.count(prompt[:1])


def alpha(prompt: str, answer: str) -> bool:
    return "a" in answer


def never(prompt: str, answer: str) -> bool:
    return False


def one_argument(prompt: str) -> bool:
    return True


def text(prompt: str, answer: str) -> str:
    return answer


def undefined(prompt: str, answer: str) -> float:
    return float("nan")
