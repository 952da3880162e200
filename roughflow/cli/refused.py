"""What the user can mend, said in one line."""


class Refused(Exception):
    """Bad input: the message says what is wrong and what to do."""
