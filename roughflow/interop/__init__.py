"""roughflow inside other libraries: one file each, imported only when it is asked for."""
