"""A fit as one page of HTML to send on."""

from ._report import write_report as write_report
