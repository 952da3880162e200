"""Stage 6, files: save and load models; writing is atomic."""

from ._files import (
    Interrupt as Interrupt,
    file_lock as file_lock,
    read_archive as read_archive,
    whole_file as whole_file,
    write_archive as write_archive,
)
from ._save import load as load, save as save
