"""Where a message is explained: on the page of questions and troubles, docs/faq.md."""


def see(heading: str) -> str:
    """What a message ends with; `heading` is the anchor of one on that page."""
    return f" (see faq: {heading})"
