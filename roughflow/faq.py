"""References from messages to their explanations in docs/faq.md. This module does not import JAX."""


def see(heading: str) -> str:
    """The reference to a heading of docs/faq.md, for the end of a message."""
    return f" (see faq: {heading})"
