"""Interfaces to other libraries, one file each, imported only when needed."""
