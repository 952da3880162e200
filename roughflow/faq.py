"""References from messages to their explanations in docs/faq.md, for callers that import JAX late."""


def see(heading: str) -> str:
    """The text at the end of a message that names a heading of docs/faq.md."""
    return f" (see faq: {heading})"
