"""Tests; a package, because some library installs a package called `tests` that would hide this folder."""
