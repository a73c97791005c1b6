"""The folder for what Motley measures, downloads and makes, and can make again."""

from __future__ import annotations

import os
from pathlib import Path

from motley.errors import ConfigError


def cache_folder() -> Path:
    """`motley` in XDG_CACHE_HOME or in ~/.cache. ConfigError if the user has no home folder and names no other."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(folder):  # the XDG standard ignores a relative path
        return Path(folder) / "motley"
    home = os.path.expanduser("~")
    if not os.path.isabs(home):  # "~": no HOME, and no such user; or a relative HOME
        raise ConfigError(
            "there is no folder for caches: HOME names no folder", hint="XDG_CACHE_HOME=/path names one"
        )
    return Path(home) / ".cache" / "motley"
