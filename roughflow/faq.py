"""References from messages to their explanations in docs/faq.md, for callers that import JAX late."""


def see(heading: str) -> str:
    """The reference to a heading of docs/faq.md, for the end of a message."""
    return f" (see faq: {heading})"
