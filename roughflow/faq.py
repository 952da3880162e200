"""References from messages to their explanation in docs/faq.md, for modules that must not import JAX too."""


def see(heading: str) -> str:
    """The end of a message that refers to a heading of that page."""
    return f" (see faq: {heading})"
