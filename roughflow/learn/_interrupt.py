"""Ctrl-C as a wish, not an accident."""

import signal
import threading


class Interrupt:
    """While active, the first Ctrl-C (SIGINT, or SIGTERM) sets `wanted`; the second one is as usual."""

    def __init__(self):
        self.wanted = False
        self.pressed = signal.SIGINT
        self._before: dict = {}

    def __enter__(self) -> "Interrupt":
        # Only the main thread may handle signals; elsewhere there is nothing to do.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _note(self, number, frame) -> None:
        del frame
        self.wanted, self.pressed = True, number
        signal.signal(number, self._before[number])


class Held(Interrupt):
    """While active, the first Ctrl-C waits until the end: half a file is of no use."""

    def __exit__(self, *_) -> None:
        super().__exit__()
        if self.wanted:
            signal.raise_signal(self.pressed)
