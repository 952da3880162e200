"""What tests of the command line share: small tables and fits, and Ctrl-C."""

import csv
import os
import signal

import numpy as np

import roughflow as rf

TINY = ["--steps", "2", "--likelihood-steps", "2", "--width", "4", "--depth", "1", "--quiet"]


def write(path, header, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def table(path, rows=200, columns=("a", "b"), seed=0):
    """As many rows as `fitted` has, unless asked for others: one program fits them all."""
    return write(path, columns, np.random.default_rng(seed).normal(3, 2, (rows, len(columns))))


def read(path):
    with open(path, newline="") as file:
        header, *rows = csv.reader(file)
    return header, np.array(rows, float)


def interrupt_after(monkeypatch, steps):
    """Press Ctrl-C once the fit has saved its state at that step."""
    write_archive = rf.train._checkpoint.write_archive
    pressed = []

    def write(path, header, arrays):
        write_archive(path, header, arrays)
        if header["step"] == steps and not pressed:
            pressed.append(steps)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(rf.train._checkpoint, "write_archive", write)
    monkeypatch.setattr(rf.train._checkpoint, "SECONDS_BETWEEN_WRITES", 0.0)
