"""Interfaces to other libraries, with one module for each, which is imported only when needed."""
